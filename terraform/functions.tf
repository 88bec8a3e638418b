locals {
  functions = {
    webhook = {
      description     = "HTTPS from Shopify: a signed delivery becomes a durable message"
      target          = "webhook"
      ingress         = "ALLOW_ALL"
      cpu             = var.webhook.cpu
      memory          = var.webhook.memory
      concurrency     = var.webhook.concurrency
      min_instances   = var.webhook.min_instances
      max_instances   = var.webhook.max_instances
      timeout_seconds = var.webhook.timeout_seconds
      environment     = { PUBSUB_TOPIC = local.topic }
    }
    subscriber = {
      description     = "Pub/Sub push: a message becomes rows in its tenant's database"
      target          = "subscribe"
      ingress         = "ALLOW_INTERNAL_ONLY"
      cpu             = var.subscriber.cpu
      memory          = var.subscriber.memory
      concurrency     = var.subscriber.concurrency
      min_instances   = var.subscriber.min_instances
      max_instances   = var.subscriber.max_instances
      timeout_seconds = var.subscriber.timeout_seconds
      environment     = { TENANT_POOL_SIZE = tostring(var.tenant_pool_size) }
    }
    retry = {
      description     = "Cloud Scheduler's tick: the outbox is sent, failed events that are due are replayed"
      target          = "retry"
      ingress         = "ALLOW_INTERNAL_ONLY"
      cpu             = var.retry.cpu
      memory          = var.retry.memory
      concurrency     = 1
      min_instances   = var.retry.min_instances
      max_instances   = 1
      timeout_seconds = var.retry.timeout_seconds
      environment = merge(
        {
          AUTO_MIGRATE                    = tostring(var.auto_migrate)
          DEAD_LETTER_RETENTION_DAYS      = tostring(var.dead_letter_retention_days)
          LEASE_SECONDS                   = tostring(var.lease_seconds)
          MAINTENANCE_TIME_BUDGET_SECONDS = tostring(var.maintenance_time_budget_seconds)
          NOTIFIER_ALERT_CHANNEL          = var.notifier_alert_channel
          NOTIFIER_FALLBACK_CHANNEL       = var.notifier_fallback_channel
          NOTIFIER_TIME_BUDGET_SECONDS    = tostring(var.notifier_time_budget_seconds)
          PUBSUB_RETENTION_DAYS           = tostring(var.pubsub_retention_days)
          PUBSUB_TOPIC                    = local.topic
          RETRY_TIME_BUDGET_SECONDS       = tostring(var.retry_time_budget_seconds)
          TENANT_POOL_SIZE                = tostring(var.tenant_pool_size)
        },
        local.retention,
      )
    }
  }

  # What is null stays unset: the code then keeps things for ever.
  retention = {
    for name, days in {
      RETENTION_AUDIT_DAYS            = var.retention.audit_days
      RETENTION_EVENT_PAYLOAD_DAYS    = var.retention.event_payload_days
      RETENTION_RESOLVED_DAYS         = var.retention.resolved_days
      RETENTION_RESOLVED_PAYLOAD_DAYS = var.retention.resolved_payload_days
    } : name => tostring(days) if days != null
  }

  # In Pub/Sub, as a dead letter, and in Pub/Sub again when that is published once more.
  message_lifetime_days = 2 * var.pubsub_retention_days + var.dead_letter_retention_days

  common_environment = {
    APP_POOLER_MODE      = var.database_pooler_mode
    GOOGLE_CLOUD_PROJECT = var.project_id
    LOG_LEVEL            = var.log_level
  }

  managed_settings = toset(concat(
    keys(local.common_environment),
    keys(local.secrets),
    ["THREADS"],
    [for name in keys(var.retention) : "RETENTION_${upper(name)}"],
    flatten([for function in local.functions : keys(function.environment)]),
  ))

  # Two revisions overlap while a new one takes over, and Cloud Run may exceed the maximum for a
  # moment. The numbers are those of shared/bootstrap.py; ten are left to operators and to Google.
  connections_per_instance = { webhook = 8, subscriber = 4, retry = 5 }
  connections_needed = 10 + 2 * sum([
    for name, function in local.functions : function.max_instances * local.connections_per_instance[name]
  ])

  # Waiting for the network, migrations that have little to do, and what was started just before a
  # budget ended. Maintenance comes after the replays, the notifier beside both: its last attempt
  # starts when its budget ends, and is cut off after 120 s, whatever the profile says.
  retry_margin_seconds     = 60
  notifier_attempt_seconds = 120
  retry_seconds_needed = local.retry_margin_seconds + max(
    var.retry_time_budget_seconds + var.maintenance_time_budget_seconds,
    var.notifier_time_budget_seconds + local.notifier_attempt_seconds,
  )
}

resource "google_cloudfunctions2_function" "this" {
  for_each = local.functions

  # checkov:skip=CKV_GCP_124: Shopify calls the webhook from the internet. The other two admit internal calls only; tests/identity.tftest.hcl holds that.
  name        = "${var.name}-${each.key}"
  location    = var.region
  description = each.value.description

  build_config {
    runtime           = var.runtime
    entry_point       = each.value.target
    service_account   = google_service_account.this["build"].name
    docker_repository = google_artifact_registry_repository.images.id

    source {
      storage_source {
        bucket = google_storage_bucket.bundles.name
        object = google_storage_bucket_object.bundle[each.key].name
      }
    }
  }

  service_config {
    service_account_email            = google_service_account.this[each.key].email
    ingress_settings                 = each.value.ingress
    available_cpu                    = each.value.cpu # never derived: concurrency needs a whole one
    available_memory                 = each.value.memory
    max_instance_request_concurrency = each.value.concurrency
    min_instance_count               = each.value.min_instances
    max_instance_count               = each.value.max_instances
    timeout_seconds                  = each.value.timeout_seconds
    all_traffic_on_latest_revision   = true

    environment_variables = merge(
      var.settings,
      local.common_environment,
      each.value.environment,
      { THREADS = tostring(each.value.concurrency) }, # a request more than threads would only queue
    )

    dynamic "secret_environment_variables" {
      for_each = { for key, secret in local.secrets : key => secret if contains(secret.readers, each.key) }

      content {
        key        = secret_environment_variables.key
        project_id = var.project_id
        secret     = google_secret_manager_secret.this[secret_environment_variables.key].secret_id
        version    = google_secret_manager_secret_version.this[secret_environment_variables.key].version
      }
    }

    direct_vpc_egress = local.egress[each.key].direct == null ? null : "VPC_EGRESS_${local.egress[each.key].direct}"

    dynamic "direct_vpc_network_interface" {
      for_each = local.egress[each.key].direct == null ? [] : [google_compute_subnetwork.functions[0]]

      content {
        network    = google_compute_network.this[0].id
        subnetwork = direct_vpc_network_interface.value.id
      }
    }

    vpc_connector                 = local.egress[each.key].connector == null ? null : google_vpc_access_connector.this[0].id
    vpc_connector_egress_settings = local.egress[each.key].connector
  }

  depends_on = [time_sleep.grants]
}
