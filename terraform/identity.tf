# One account per function, one for each caller, one for builds. No keys, no primitive roles, and
# members are added beside those that others gave.

locals {
  accounts = {
    webhook    = "Runs the webhook function"
    subscriber = "Runs the subscriber function"
    retry      = "Runs the retry function"
    push       = "Pub/Sub calls the subscriber as this account"
    tick       = "Cloud Scheduler calls the retry function as this account"
    build      = "Builds the functions"
  }

  # Cloud Build's own choice differs from one organization to the next, down to an account
  # without any role.
  build_roles = ["roles/logging.logWriter", "roles/storage.objectViewer"]
}

resource "google_service_account" "this" {
  for_each = local.accounts

  account_id   = "${var.name}-${each.key}"
  display_name = "${var.name}: ${each.key}"
  description  = each.value

  depends_on = [time_sleep.services]
}

resource "google_project_iam_member" "build" {
  for_each = toset(local.build_roles)

  project = var.project_id
  role    = each.key
  member  = google_service_account.this["build"].member
}

resource "google_artifact_registry_repository_iam_member" "build" {
  repository = google_artifact_registry_repository.images.name
  location   = var.region
  role       = "roles/artifactregistry.writer"
  member     = google_service_account.this["build"].member
}

# The webhook publishes what it received, the retry function what Pub/Sub did not take then.
resource "google_pubsub_topic_iam_member" "publisher" {
  for_each = toset(["webhook", "retry"])

  topic  = google_pubsub_topic.events.id
  role   = "roles/pubsub.publisher"
  member = google_service_account.this[each.key].member
}

resource "google_pubsub_topic_iam_member" "shopify" {
  count = var.shopify_native_delivery ? 1 : 0

  topic  = google_pubsub_topic.events.id
  role   = "roles/pubsub.publisher"
  member = "serviceAccount:delivery@shopify-pubsub-webhooks.iam.gserviceaccount.com"
}

resource "google_secret_manager_secret_iam_member" "reader" {
  for_each = local.secret_readers

  secret_id = google_secret_manager_secret.this[each.value.secret].id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.this[each.value.function].member
}

# Pub/Sub's agent fails without a word where one of these three is missing: no token, no push; no
# right to give up, and a message goes round for ever.
resource "google_service_account_iam_member" "pubsub_makes_tokens" {
  service_account_id = google_service_account.this["push"].name
  role               = "roles/iam.serviceAccountTokenCreator"
  member             = local.pubsub_agent
}

resource "google_pubsub_topic_iam_member" "pubsub_gives_up" {
  topic  = google_pubsub_topic.dead_letters.id
  role   = "roles/pubsub.publisher"
  member = local.pubsub_agent
}

resource "google_pubsub_subscription_iam_member" "pubsub_takes_away" {
  subscription = google_pubsub_subscription.push.name
  role         = "roles/pubsub.subscriber"
  member       = local.pubsub_agent
}

# A grant takes a minute or more until every part of Google's cloud knows of it. Without the wait
# the first build, or an instance's first look at a secret, is refused and the apply fails.
resource "time_sleep" "grants" {
  create_duration = "90s"

  triggers = {
    accounts = join(" ", sort([for account in google_service_account.this : account.email]))
    secrets  = join(" ", sort(keys(local.secret_readers)))
  }

  depends_on = [
    google_artifact_registry_repository_iam_member.build,
    google_project_iam_member.build,
    google_pubsub_topic_iam_member.publisher,
    google_secret_manager_secret_iam_member.reader,
    google_service_account_iam_member.pubsub_makes_tokens,
  ]
}

# Who may call which function. The function's own resource does not take this role, its Cloud Run
# service does. A function that is made anew comes without callers.

resource "google_cloud_run_service_iam_member" "anybody_calls_webhook" {
  count = var.public_webhook ? 1 : 0

  # checkov:skip=CKV_GCP_102: Shopify has no identity at Google. The webhook answers 401 to whatever is not signed with the app's secret.
  location = var.region
  service  = google_cloudfunctions2_function.this["webhook"].name
  role     = "roles/run.invoker"
  member   = "allUsers"

  lifecycle {
    replace_triggered_by = [google_cloudfunctions2_function.this["webhook"].id]
  }
}

resource "google_cloud_run_service_iam_member" "push_calls_subscriber" {
  location = var.region
  service  = google_cloudfunctions2_function.this["subscriber"].name
  role     = "roles/run.invoker"
  member   = google_service_account.this["push"].member

  lifecycle {
    replace_triggered_by = [google_cloudfunctions2_function.this["subscriber"].id]
  }
}

resource "google_cloud_run_service_iam_member" "tick_calls_retry" {
  location = var.region
  service  = google_cloudfunctions2_function.this["retry"].name
  role     = "roles/run.invoker"
  member   = google_service_account.this["tick"].member

  lifecycle {
    replace_triggered_by = [google_cloudfunctions2_function.this["retry"].id]
  }
}
