# The provider is mocked; nothing is asked of Google. What it has of ephemeral resources cannot be
# mocked, and is not opened here.
mock_provider "google" {}
mock_provider "archive" {}
mock_provider "time" {}

provider "google" {
  alias        = "reading_back"
  access_token = "none"
}

variables {
  project_id             = "acme-prod"
  region                 = "europe-west1"
  shopify_client_secrets = "shpss_invented"
  credential_keys        = "abcdefghijabcdefghijabcdefghijabcdefghijabc="
  privacy_hash_key       = "invented-invented-invented-invented"
  database_mode          = "external"
  database_url           = "postgresql://hookledger:invented@db.example.com:5432/hookledger"
  notifier_secret_values = {}
}

run "who_may_do_what" {
  assert {
    condition = toset(keys(google_service_account.this)) == toset([
      "webhook", "subscriber", "retry", "push", "tick", "build",
    ])
    error_message = "There is one account for each function, one for each caller, and one for builds."
  }

  assert {
    condition     = alltrue([for name, function in google_cloudfunctions2_function.this : function.service_config[0].service_account_email == google_service_account.this[name].email])
    error_message = "Each function runs as its own account."
  }

  assert {
    condition     = alltrue([for function in google_cloudfunctions2_function.this : function.build_config[0].service_account == google_service_account.this["build"].name])
    error_message = "Builds run as the account made for them."
  }

  assert {
    condition = toset(keys(google_secret_manager_secret_iam_member.reader)) == toset([
      "webhook app-database-url",
      "webhook shopify-client-secrets",
      "subscriber app-database-url",
      "subscriber credential-keys",
      "subscriber privacy-hash-key",
      "retry app-database-url",
      "retry credential-keys",
      "retry privacy-hash-key",
    ])
    error_message = "A function reads the secrets that it uses, and no others."
  }

  assert {
    condition     = alltrue([for key, grant in google_secret_manager_secret_iam_member.reader : grant.member == google_service_account.this[split(" ", key)[0]].member && grant.role == "roles/secretmanager.secretAccessor"])
    error_message = "A secret is read by the account that its grant is named after."
  }

  assert {
    condition     = toset(keys(google_pubsub_topic_iam_member.publisher)) == toset(["webhook", "retry"]) && alltrue([for name, grant in google_pubsub_topic_iam_member.publisher : grant.member == google_service_account.this[name].member && grant.role == "roles/pubsub.publisher"])
    error_message = "The webhook publishes, and the retry function what is in the outbox."
  }

  assert {
    condition     = google_pubsub_topic_iam_member.shopify[0].member == "serviceAccount:delivery@shopify-pubsub-webhooks.iam.gserviceaccount.com" && google_pubsub_topic_iam_member.shopify[0].role == "roles/pubsub.publisher"
    error_message = "Shopify publishes by itself."
  }

  assert {
    condition     = toset(keys(google_project_iam_member.build)) == toset(["roles/logging.logWriter", "roles/storage.objectViewer"])
    error_message = "On the project there are two roles, both of the account for builds."
  }
}

run "who_may_call" {
  assert {
    condition     = google_cloud_run_service_iam_member.anybody_calls_webhook[0].member == "allUsers" && google_cloud_run_service_iam_member.anybody_calls_webhook[0].service == "hookledger-webhook"
    error_message = "Anybody calls the webhook."
  }

  assert {
    condition     = google_cloud_run_service_iam_member.push_calls_subscriber.member == google_service_account.this["push"].member && google_cloud_run_service_iam_member.push_calls_subscriber.service == "hookledger-subscriber"
    error_message = "Pub/Sub's caller, and nobody else, calls the subscriber."
  }

  assert {
    condition     = google_cloud_run_service_iam_member.tick_calls_retry.member == google_service_account.this["tick"].member && google_cloud_run_service_iam_member.tick_calls_retry.service == "hookledger-retry"
    error_message = "The scheduler's caller, and nobody else, calls the retry function."
  }

  assert {
    condition     = { for name, function in google_cloudfunctions2_function.this : name => function.service_config[0].ingress_settings } == { webhook = "ALLOW_ALL", subscriber = "ALLOW_INTERNAL_ONLY", retry = "ALLOW_INTERNAL_ONLY" }
    error_message = "Only the webhook is reachable from the internet."
  }

  assert {
    condition     = google_pubsub_subscription.push.push_config[0].push_endpoint == google_cloudfunctions2_function.this["subscriber"].service_config[0].uri && google_pubsub_subscription.push.push_config[0].oidc_token[0].audience == google_cloudfunctions2_function.this["subscriber"].service_config[0].uri
    error_message = "Pub/Sub pushes to the run.app address, with a token for that address."
  }

  assert {
    condition     = google_cloud_scheduler_job.retry.http_target[0].uri == google_cloudfunctions2_function.this["retry"].service_config[0].uri && google_cloud_scheduler_job.retry.http_target[0].oidc_token[0].audience == google_cloudfunctions2_function.this["retry"].service_config[0].uri
    error_message = "The scheduler calls the run.app address, with a token for that address."
  }

  assert {
    condition     = google_service_account_iam_member.pubsub_makes_tokens.role == "roles/iam.serviceAccountTokenCreator" && google_service_account_iam_member.pubsub_makes_tokens.service_account_id == google_service_account.this["push"].name
    error_message = "Pub/Sub's agent makes tokens of the account that pushes."
  }

  assert {
    condition     = google_pubsub_topic_iam_member.pubsub_gives_up.role == "roles/pubsub.publisher" && google_pubsub_subscription_iam_member.pubsub_takes_away.role == "roles/pubsub.subscriber"
    error_message = "Pub/Sub's agent moves a dead letter from the one to the other."
  }
}

run "where_the_policy_forbids_it" {
  variables {
    public_webhook = false
  }

  assert {
    condition     = length(google_cloud_run_service_iam_member.anybody_calls_webhook) == 0
    error_message = "public_webhook = false leaves allUsers out."
  }

  assert {
    condition     = !strcontains(output.shopify_app_toml, "compliance_topics")
    error_message = "Without a public webhook Shopify is not told to call it."
  }
}

run "without_native_delivery" {
  variables {
    shopify_native_delivery = false
  }

  assert {
    condition     = length(google_pubsub_topic_iam_member.shopify) == 0 && output.shopify_pubsub_address == null && !strcontains(output.shopify_app_toml, "pubsub://")
    error_message = "shopify_native_delivery = false keeps Shopify's account out."
  }
}

run "what_the_notifier_refers_to" {
  command = plan

  variables {
    notifier_secrets       = { NOTIFIER_SMTP_PASSWORD = 3 }
    notifier_secret_values = { NOTIFIER_SMTP_PASSWORD = "invented" }
  }

  assert {
    condition     = contains(keys(google_secret_manager_secret_iam_member.reader), "retry notifier-smtp-password") && !contains(keys(google_secret_manager_secret_iam_member.reader), "webhook notifier-smtp-password") && !contains(keys(google_secret_manager_secret_iam_member.reader), "subscriber notifier-smtp-password")
    error_message = "Only the retry function reads what the notifier's profiles refer to."
  }

  assert {
    condition     = google_secret_manager_secret_version.this["NOTIFIER_SMTP_PASSWORD"].secret_data_wo_version == "3"
    error_message = "A value is written when its number rises."
  }

  assert {
    condition     = contains([for secret in google_cloudfunctions2_function.this["retry"].service_config[0].secret_environment_variables : secret.key], "NOTIFIER_SMTP_PASSWORD")
    error_message = "The profile's _env:NOTIFIER_SMTP_PASSWORD is in the retry function's environment."
  }
}
