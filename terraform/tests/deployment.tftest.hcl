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
}

run "what_must_never_be" {
  command = plan

  assert {
    condition     = google_cloudfunctions2_function.this["retry"].service_config[0].max_instance_count == 1 && google_cloudfunctions2_function.this["retry"].service_config[0].max_instance_request_concurrency == 1
    error_message = "There is never a second run of the retry function."
  }

  assert {
    condition     = alltrue([for function in google_cloudfunctions2_function.this : length(setintersection(keys(function.service_config[0].environment_variables), ["APP_DATABASE_URL", "SHOPIFY_CLIENT_SECRETS", "CREDENTIAL_KEYS", "SHOPIFY_STORAGE_DATABASE_URL", "PRIVACY_HASH_KEY"])) == 0])
    error_message = "No secret is a plain variable."
  }

  assert {
    condition     = alltrue([for function in google_cloudfunctions2_function.this : length(function.event_trigger) == 0])
    error_message = "No function has an event trigger."
  }

  assert {
    condition     = alltrue([for subscription in [google_pubsub_subscription.push, google_pubsub_subscription.dead_letters] : subscription.expiration_policy[0].ttl == ""])
    error_message = "No subscription expires."
  }

  assert {
    condition     = google_storage_bucket.bundles.public_access_prevention == "enforced" && google_storage_bucket.bundles.versioning[0].enabled
    error_message = "Bundles are private, and kept."
  }

  assert {
    condition     = length(google_sql_database_instance.app[0].settings[0].ip_configuration[0].authorized_networks) == 0 && google_sql_database_instance.app[0].settings[0].ip_configuration[0].ssl_mode == "ENCRYPTED_ONLY"
    error_message = "No network is admitted to the database's public address, and nothing without TLS."
  }

  assert {
    condition     = alltrue([for version in google_secret_manager_secret_version.this : version.deletion_policy == "DISABLE"])
    error_message = "A secret's old version is never destroyed."
  }
}

run "the_defaults" {
  command = plan

  assert {
    condition     = google_cloudfunctions2_function.this["retry"].service_config[0].environment_variables["RETENTION_RESOLVED_PAYLOAD_DAYS"] == "30" && !contains(keys(google_cloudfunctions2_function.this["retry"].service_config[0].environment_variables), "RETENTION_AUDIT_DAYS")
    error_message = "Payloads of what is resolved go after 30 days; what has no term is kept."
  }

  assert {
    condition     = alltrue([for name, function in google_cloudfunctions2_function.this : function.service_config[0].environment_variables["THREADS"] == tostring(function.service_config[0].max_instance_request_concurrency)])
    error_message = "A function has a thread for each request."
  }

  assert {
    condition     = google_cloudfunctions2_function.this["retry"].service_config[0].environment_variables["AUTO_MIGRATE"] == "true" && !contains(keys(google_cloudfunctions2_function.this["webhook"].service_config[0].environment_variables), "AUTO_MIGRATE")
    error_message = "The retry function migrates; an apply alone gives a working system."
  }

  assert {
    condition     = google_pubsub_subscription.push.ack_deadline_seconds > google_cloudfunctions2_function.this["subscriber"].service_config[0].timeout_seconds
    error_message = "Pub/Sub waits longer than the subscriber runs."
  }

  assert {
    condition     = tonumber(trimsuffix(google_cloud_scheduler_job.retry.attempt_deadline, "s")) > google_cloudfunctions2_function.this["retry"].service_config[0].timeout_seconds && google_cloud_scheduler_job.retry.retry_config[0].retry_count == 0
    error_message = "The scheduler waits longer than the retry function runs, and leaves retrying to the next minute."
  }

  assert {
    condition     = google_pubsub_topic.events.message_retention_duration == "604800s" && google_pubsub_subscription.push.message_retention_duration == "604800s" && google_pubsub_subscription.dead_letters.message_retention_duration == "1209600s"
    error_message = "Messages are kept for 7 days, dead letters for 14."
  }

  assert {
    condition     = google_pubsub_subscription.push.dead_letter_policy[0].max_delivery_attempts == 100 && google_pubsub_subscription.push.retry_policy[0].minimum_backoff == "10s" && google_pubsub_subscription.push.retry_policy[0].maximum_backoff == "600s"
    error_message = "Pub/Sub tries 100 times, after 10 s to 600 s."
  }

  assert {
    condition     = alltrue([for policy in google_monitoring_alert_policy.this : policy.conditions[0].condition_prometheus_query_language[0].disable_metric_validation && length(policy.documentation[0].content) > 100])
    error_message = "Every alert works without its metric, and says what to do."
  }
}

run "cloud_sql" {
  command = plan

  assert {
    condition     = google_sql_database_instance.app[0].database_version == "POSTGRES_17" && google_sql_database_instance.app[0].settings[0].edition == "ENTERPRISE"
    error_message = "PostgreSQL 17 in the Enterprise edition."
  }

  assert {
    condition     = google_sql_database_instance.app[0].deletion_protection && google_sql_database_instance.app[0].settings[0].deletion_protection_enabled
    error_message = "The database is protected from deletion."
  }

  assert {
    condition     = google_sql_database_instance.app[0].settings[0].backup_configuration[0].point_in_time_recovery_enabled && google_sql_database_instance.app[0].settings[0].ip_configuration[0].ipv4_enabled
    error_message = "The database is restored to any moment, and reached by the proxy."
  }

  assert {
    condition     = one([for flag in google_sql_database_instance.app[0].settings[0].database_flags : flag.value if flag.name == "max_connections"]) == "300"
    error_message = "The database admits as many connections as were counted with."
  }

  assert {
    condition     = alltrue([for function in google_cloudfunctions2_function.this : function.service_config[0].direct_vpc_egress == "VPC_EGRESS_PRIVATE_RANGES_ONLY" && function.service_config[0].vpc_connector == null])
    error_message = "Only private addresses are reached through the network."
  }

  assert {
    condition     = length(google_compute_router_nat.egress) == 0 && length(google_vpc_access_connector.this) == 0
    error_message = "Neither NAT nor connector is made unasked."
  }
}

run "cloud_sql_without_a_public_address" {
  command = plan

  variables {
    operator_access = "none"
    egress_mode     = "connector"
  }

  assert {
    condition     = !google_sql_database_instance.app[0].settings[0].ip_configuration[0].ipv4_enabled
    error_message = "operator_access = none takes the public address away."
  }

  assert {
    condition     = length(google_vpc_access_connector.this) == 1 && alltrue([for function in google_cloudfunctions2_function.this : length(function.service_config[0].direct_vpc_network_interface) == 0 && function.service_config[0].vpc_connector_egress_settings == "PRIVATE_RANGES_ONLY"])
    error_message = "egress_mode = connector replaces the direct way."
  }
}

run "external" {
  command = plan

  variables {
    database_mode = "external"
    database_url  = "postgresql://hookledger:invented@db.example.com:5432/hookledger"
  }

  assert {
    condition     = length(google_sql_database_instance.app) == 0 && length(google_compute_network.this) == 0 && length(google_secret_manager_secret.database_password) == 0 && length(google_monitoring_alert_policy.this) == 14
    error_message = "With a database elsewhere there is neither an instance nor a network."
  }

  assert {
    condition     = alltrue([for function in google_cloudfunctions2_function.this : length(function.service_config[0].direct_vpc_network_interface) == 0])
    error_message = "Functions reach the internet directly."
  }
}

run "external_with_a_fixed_address" {
  command = plan

  variables {
    database_mode    = "external"
    database_url     = "postgresql://hookledger:invented@db.example.com:5432/hookledger"
    static_egress_ip = true
  }

  assert {
    condition     = length(google_compute_router_nat.egress) == 1 && length(google_compute_address.egress) == 1 && length(google_service_networking_connection.services) == 0
    error_message = "A fixed address needs a network, a router, NAT and the address."
  }

  assert {
    condition     = length(google_cloudfunctions2_function.this["webhook"].service_config[0].direct_vpc_network_interface) == 0 && alltrue([for name in ["subscriber", "retry"] : google_cloudfunctions2_function.this[name].service_config[0].direct_vpc_egress == "VPC_EGRESS_ALL_TRAFFIC"])
    error_message = "Only who talks to tenants uses it."
  }
}
