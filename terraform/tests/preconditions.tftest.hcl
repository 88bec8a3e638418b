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
  database_mode          = "external"
  database_url           = "postgresql://hookledger:invented@db.example.com:5432/hookledger"
}

run "more_connections_than_the_database_admits" {
  command = plan
  variables {
    webhook = { max_instances = 40 }
  }
  expect_failures = [var.database_max_connections]
}

run "a_subscriber_that_outlasts_the_ack_deadline" {
  command = plan
  variables {
    subscriber = { timeout_seconds = 60 }
  }
  expect_failures = [var.subscriber]
}

run "a_retry_function_that_is_cut_off_before_its_budget" {
  command = plan
  variables {
    retry_time_budget_seconds = 100
    retry                     = { timeout_seconds = 120 }
  }
  expect_failures = [var.retry]
}

run "a_retry_function_that_is_cut_off_during_the_last_attempt_to_notify" {
  command = plan
  variables {
    notifier_time_budget_seconds = 61
  }
  expect_failures = [var.retry]
}

run "a_retry_function_that_outlasts_the_scheduler" {
  command = plan
  variables {
    retry = { timeout_seconds = 1800 }
  }
  expect_failures = [var.retry]
}

run "messages_that_outlast_the_erasure_term" {
  command = plan
  variables {
    pubsub_retention_days = 9
  }
  expect_failures = [var.dead_letter_retention_days]
}

run "payloads_that_outlast_the_erasure_term" {
  command = plan
  variables {
    retention = { resolved_payload_days = 31 }
  }
  expect_failures = [var.retention]
}

run "an_identity_that_goes_before_its_message_can_come_back" {
  command = plan
  variables {
    retention = { audit_days = 27 }
  }
  expect_failures = [var.retention]
}

run "a_lease_that_ends_before_the_run" {
  command = plan
  variables {
    lease_seconds = 50
  }
  expect_failures = [var.lease_seconds]
}

run "a_tenant_that_takes_all_threads" {
  command = plan
  variables {
    tenant_pool_size = 8
  }
  expect_failures = [var.tenant_pool_size]
}

run "a_secret_in_plain_sight" {
  command = plan
  variables {
    settings = { SHOPIFY_STORAGE_DATABASE_URL = "postgresql://hookledger:invented@db.example.com/tenant" }
  }
  expect_failures = [var.settings]
}

run "a_setting_that_is_made_here" {
  command = plan
  variables {
    settings = { RETENTION_RESOLVED_PAYLOAD_DAYS = "60" }
  }
  expect_failures = [var.settings]
}

run "a_rotation_that_would_lose_the_old_key" {
  command = plan
  variables {
    credential_keys_version  = 2
    privacy_hash_key_version = 2
  }
  expect_failures = [var.credential_keys, var.privacy_hash_key]
}

run "no_way_in_for_events" {
  command = plan
  variables {
    public_webhook          = false
    shopify_native_delivery = false
  }
  expect_failures = [var.public_webhook]
}

run "a_database_without_an_address" {
  command = plan
  variables {
    database_url = null
  }
  expect_failures = [var.database_url]
}

# Each variable in one run only, and one fault in each; and none beside one that it is compared with,
# since Terraform says nothing of what depends on a fault.
run "out_of_range" {
  command = plan
  variables {
    ack_deadline_seconds            = 601
    alert_emails                    = ["nobody"]
    credential_keys_version         = 0
    database                        = { tier = "db-perf-optimized-N-2" }
    database_password_version       = 1.5
    database_pooler_mode            = "statement"
    egress_mode                     = "tunnel"
    log_level                       = "WARNING"
    maintenance_time_budget_seconds = 0
    network_ranges                  = { functions = "10.61.0.0/27" }
    notification_channels           = ["pager"]
    notifier_time_budget_seconds    = 0
    operator_access                 = "internet"
    privacy_hash_key_version        = 0
    pubsub_retention_days           = 0
    retry_time_budget_seconds       = 0
    runtime                         = "python38"
    shopify_client_secrets          = " , "
    shopify_client_secrets_version  = 0
    shopify_topics                  = ["ORDERS_CREATE"]
    static_egress_functions         = ["console"]
    webhook                         = { timeout_seconds = 4 }
  }
  expect_failures = [
    var.ack_deadline_seconds, var.alert_emails, var.credential_keys_version,
    var.database, var.database_password_version, var.database_pooler_mode, var.egress_mode,
    var.log_level, var.maintenance_time_budget_seconds, var.network_ranges,
    var.notification_channels, var.notifier_time_budget_seconds, var.operator_access,
    var.privacy_hash_key_version, var.pubsub_retention_days, var.retry_time_budget_seconds,
    var.runtime,
    var.shopify_client_secrets, var.shopify_client_secrets_version, var.shopify_topics,
    var.static_egress_functions, var.webhook,
  ]
}

run "out_of_range_too" {
  command = plan
  variables {
    database                   = { availability = "GLOBAL" }
    database_mode              = "sqlite"
    dead_letter_retention_days = 32
    name                       = "Hookledger"
    network_ranges             = { connector = "10.61.1.0/29" }
    project_id                 = "123456789012"
    region                     = "europe-west1-b"
    retry                      = { min_instances = 2 }
    subscriber                 = { cpu = "0.5" }
    webhook                    = { cpu = "0.5" }
  }
  expect_failures = [
    var.database, var.database_mode, var.dead_letter_retention_days, var.name,
    var.network_ranges, var.project_id, var.region, var.retry, var.subscriber,
    var.webhook,
  ]
}

run "out_of_range_once_more" {
  command = plan
  variables {
    credential_keys  = "no Fernet key"
    database_url     = "db.example.com"
    privacy_hash_key = "short"
    retention        = { event_payload_days = 0 }
    subscriber       = { min_instances = 11 }
    webhook          = { min_instances = 11 }
  }
  expect_failures = [
    var.credential_keys, var.database_url, var.privacy_hash_key, var.retention, var.subscriber,
    var.webhook,
  ]
}

run "a_setting_in_small_letters" {
  command = plan
  variables {
    settings = { replay_parallelism = "16" }
  }
  expect_failures = [var.settings]
}

run "a_notifier_secret_that_no_profile_can_name" {
  command = plan
  variables {
    notifier_secrets       = { SMTP_PASSWORD = 1 }
    notifier_secret_values = { SMTP_PASSWORD = "invented" }
  }
  expect_failures = [var.notifier_secrets]
}

run "a_notifier_secret_without_a_value" {
  command = plan
  variables {
    notifier_secrets = { NOTIFIER_SMTP_PASSWORD = 1 }
  }
  expect_failures = [var.notifier_secret_values]
}

run "a_notifier_secret_whose_version_is_none" {
  command = plan
  variables {
    notifier_secrets       = { NOTIFIER_SMTP_PASSWORD = 0 }
    notifier_secret_values = { NOTIFIER_SMTP_PASSWORD = "invented" }
  }
  expect_failures = [var.notifier_secrets]
}
