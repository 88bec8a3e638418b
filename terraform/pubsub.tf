locals {
  # Written out and not taken from the topic: variables are checked against what depends on it.
  topic = "projects/${var.project_id}/topics/${var.name}-events"
}

resource "google_pubsub_topic" "events" {
  # checkov:skip=CKV_GCP_83: Google's own keys encrypt the messages, which are gone after days. A key of ours would be one more thing whose loss stops everything.
  name                       = "${var.name}-events"
  message_retention_duration = "${var.pubsub_retention_days * 86400}s" # to seek back to

  # What Shopify tells of customers stays where everything else is.
  message_storage_policy {
    allowed_persistence_regions = [var.region]
  }

  depends_on = [time_sleep.services]
}

# An explicit subscription, not a function's event trigger: docs/adr/0009-explicit-subscription.md
resource "google_pubsub_subscription" "push" {
  name                       = "${var.name}-push"
  topic                      = google_pubsub_topic.events.id
  ack_deadline_seconds       = var.ack_deadline_seconds # for a push it is the time until the answer, too
  message_retention_duration = "${var.pubsub_retention_days * 86400}s"

  push_config {
    push_endpoint = google_cloudfunctions2_function.this["subscriber"].service_config[0].uri

    # Only the run.app address counts as internal, and a token is good for that audience only.
    oidc_token {
      service_account_email = google_service_account.this["push"].email
      audience              = google_cloudfunctions2_function.this["subscriber"].service_config[0].uri
    }
  }

  retry_policy {
    minimum_backoff = "10s"
    maximum_backoff = "600s"
  }

  # 100 attempts last for most of a day, 5 for some minutes: a database that is away for longer
  # would empty the whole backlog into the dead letters.
  dead_letter_policy {
    dead_letter_topic     = google_pubsub_topic.dead_letters.id
    max_delivery_attempts = 100
  }

  # Never: a subscription that is idle for a month would be deleted, with its messages.
  expiration_policy {
    ttl = ""
  }

  depends_on = [
    google_cloud_run_service_iam_member.push_calls_subscriber,
    google_pubsub_topic_iam_member.pubsub_gives_up,
    google_service_account_iam_member.pubsub_makes_tokens,
  ]
}

resource "google_pubsub_topic" "dead_letters" {
  # checkov:skip=CKV_GCP_83: As for the events.
  name = "${var.name}-dead-letters"

  message_storage_policy {
    allowed_persistence_regions = [var.region]
  }

  depends_on = [time_sleep.services]
}

# Without it, what Pub/Sub gives up on would go to a topic that keeps nothing.
resource "google_pubsub_subscription" "dead_letters" {
  name                       = "${var.name}-dead-letters"
  topic                      = google_pubsub_topic.dead_letters.id
  ack_deadline_seconds       = 60
  message_retention_duration = "${var.dead_letter_retention_days * 86400}s"

  expiration_policy {
    ttl = ""
  }
}
