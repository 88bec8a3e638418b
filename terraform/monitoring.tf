# Metrics from the functions' log events (docs/log-events.md), and alerts on those and on Google's
# own metrics. Conditions are PromQL without validation: a metric that nobody has written yet, as on
# the day of the first apply, is then no error, and its absence can be asked for.

locals {
  events   = "logging_googleapis_com:user_${replace(var.name, "-", "_")}_events"
  stored   = "logging_googleapis_com:user_${replace(var.name, "-", "_")}_stored_milliseconds"
  on_run   = "monitored_resource=\"cloud_run_revision\""
  lag      = "logging_googleapis_com:user_${replace(var.name, "-", "_")}_lag_milliseconds"
  function = { for name in keys(local.functions) : name => "${local.on_run},service_name=\"${var.name}-${name}\"" }
  push     = "subscription_id=\"${var.name}-push\""
  dead     = "subscription_id=\"${var.name}-dead-letters\""
  database = "database_id=\"${var.project_id}:${var.name}\""

  alerts = merge(
    {
      webhook_errors = {
        title    = "The webhook answers 5xx"
        severity = "CRITICAL"
        query    = "sum(increase(run_googleapis_com:request_count{${local.function.webhook},response_code_class=\"5xx\"}[5m])) > 0"
        duration = "60s"
        runbook  = <<-EOT
          Neither Pub/Sub nor a database took a delivery, or the function itself failed. Shopify sends again, 8 times in 4 hours; nothing is lost until then.

          1. See `webhook.unavailable` and `function.failed` in the log of `${var.name}-webhook`: they name the cause.
          2. A setting or secret is named: correct it and apply.
          3. Otherwise restore Pub/Sub or the application database, or undo the last deployment.
        EOT
      }
      webhook_slow = {
        title    = "The webhook is slow"
        severity = "ERROR"
        query    = "histogram_quantile(0.99, sum by (le) (rate(run_googleapis_com:request_latencies_bucket{${local.function.webhook}}[10m]))) > 3000"
        duration = "300s"
        runbook  = <<-EOT
          One answer in a hundred takes more than 3 s. Shopify waits for 5 s and then counts a failure.

          1. `webhook.audit_deferred` in the log: the application database is slow or full.
          2. Many new instances: raise `webhook.min_instances`.
          3. Instances at their maximum: raise `webhook.max_instances`, with `database_max_connections`.
        EOT
      }
      signatures_refused = {
        title    = "Every delivery's signature is refused"
        severity = "CRITICAL"
        query    = "(sum(increase(${local.events}{event=\"webhook.refused\"}[30m])) > 10) unless (sum(increase(${local.events}{event=\"webhook.accepted\"}[30m])) > 0)"
        duration = "0s"
        runbook  = <<-EOT
          Deliveries come, and not one fits a client secret.

          1. Was the secret rotated in Shopify? Set `shopify_client_secrets` to `new,old`, raise its version, apply.
          2. Is this the right app? Its client secret is on its page in Shopify's developer dashboard.
          3. No shop is connected yet: these are scanners, nothing to do.
        EOT
      }
      outbox_stuck = {
        title    = "The outbox does not empty"
        severity = "ERROR"
        query    = "sum(increase(${local.events}{event=\"outbox.stuck\"}[10m])) > 1"
        duration = "0s"
        runbook  = <<-EOT
          Pub/Sub did not take a message when it came, and does not take it now. It is safe in the application database and is tried every minute.

          1. See `outbox.stuck` in the log of `${var.name}-retry` for the cause.
          2. Permission: `terraform apply` restores the grants. Otherwise see Pub/Sub's status.
        EOT
      }
      nacks = {
        title    = "The subscriber refuses messages"
        severity = "ERROR"
        query    = "sum(increase(pubsub_googleapis_com:subscription_push_request_count{${local.push},response_class!=\"ack\"}[10m])) > 10"
        duration = "300s"
        runbook  = <<-EOT
          Messages come back to Pub/Sub, which delivers them again for up to ${var.pubsub_retention_days} days or 100 attempts.

          1. `failure.not_recorded` in the log of `${var.name}-subscriber`: restore the application database.
          2. `function.failed`: a setting or a bug; it names which.
          3. Neither, and answers are 401 or 403: `terraform apply` restores the grants of the push account.
        EOT
      }
      backlog_old = {
        title    = "Messages wait for the subscriber"
        severity = "ERROR"
        query    = "max(pubsub_googleapis_com:subscription_oldest_unacked_message_age{${local.push}}) > 600"
        duration = "300s"
        runbook  = <<-EOT
          The oldest message is older than ten minutes.

          1. The alert on refused messages is on too: begin there.
          2. Instances at their maximum and busy: raise `subscriber.max_instances`, with `database_max_connections`.
          3. One tenant is slow: its events go to the failure ledger after bounded waits; the backlog drains by itself.
        EOT
      }
      lag_long = {
        title    = "Events reach their tenants late"
        severity = "WARNING"
        query    = "histogram_quantile(0.99, sum by (le) (rate(${local.lag}_bucket[10m]))) > 60000"
        duration = "300s"
        runbook  = <<-EOT
          One event in a hundred takes more than a minute from our receipt to its row. Replays do not count.

          1. The alert on waiting or refused messages is on too: begin there.
          2. `webhook.publish_deferred` in the log of `${var.name}-webhook`: those came by way of the outbox, up to a minute later.
          3. Somebody sought the subscription back, or redrove dead letters: it passes.
        EOT
      }
      dead_letters = {
        title    = "There are dead letters"
        severity = "CRITICAL"
        query    = "max(pubsub_googleapis_com:subscription_num_undelivered_messages{${local.dead}}) > 0"
        duration = "0s"
        runbook  = <<-EOT
          Pub/Sub gave up on messages. They are kept for ${var.dead_letter_retention_days} days and then lost. The alert stays on until the subscription `${var.name}-dead-letters` is empty.

          1. Remove the cause: the log of `${var.name}-subscriber` has it.
          2. `python manage.py dead_letters redrive` publishes them again; docs/deploy.md has the settings under "Dead letters".
        EOT
      }
      given_up = {
        title    = "Failed events were given up"
        severity = "ERROR"
        query    = "sum(increase(${local.events}{event=\"replay.failed\",verdict=\"failed\"}[10m])) > 0 or sum(increase(${local.events}{event=\"lease.expired\",status=\"failed\"}[10m])) > 0"
        duration = "0s"
        runbook  = <<-EOT
          Their replays are used up, and nobody replays them any more until an operator says so. They are safe in the failure ledger.

          1. See them: docs/operations.md, "See failed events".
          2. Remove the cause, then requeue them; or resolve them with a reason.
        EOT
      }
      incidents = {
        title    = "A tenant's database is unavailable"
        severity = "WARNING"
        query    = "sum(increase(${local.events}{event=\"incident.opened\"}[15m])) > 0"
        duration = "0s"
        runbook  = <<-EOT
          Its events wait in the failure ledger; the database is tried after 1, 2, 4, 8 and then every 15 minutes, and they are replayed when it is back. Other tenants are not affected.

          1. `incident.opened` in the log of `${var.name}-retry` names organization and cause.
          2. A password or an address: run `connect_shop` again. A pause or an outage: tell its owner.
          3. What is open now: `select * from subscriber_tenantincident where ended_at is null`.
        EOT
      }
      retry_not_run = {
        title    = "The retry function does not run"
        severity = "CRITICAL"
        query    = "absent_over_time(${local.events}{event=\"replay.finished\"}[15m])"
        duration = "0s"
        runbook  = <<-EOT
          No run has ended for 15 minutes: failed events wait, and nobody probes tenants that are away.

          1. `gcloud scheduler jobs describe ${var.name}-retry --location ${var.region}`: is it paused? What was its last status?
          2. `replay.unavailable` in the log of `${var.name}-retry`: restore the application database.
          3. `function.failed`: it names a setting, a migration or a bug.
          4. 401 or 403: `terraform apply` restores the grants of the scheduler's account.
        EOT
      }
      tick_partly_failed = {
        title    = "A part of the retry function's work fails"
        severity = "WARNING"
        query    = "sum(increase(${local.events}{event=~\"tick[.]part_failed|maintenance[.]failed|privacy[.]failed\"}[3h])) > 2"
        duration = "0s"
        runbook  = <<-EOT
          The replays go on; what goes wrong is the outbox, retention or an erasure.

          1. See `tick.part_failed`, `maintenance.failed` and `privacy.failed` in the log of `${var.name}-retry`: they have the error.
          2. It is tried again, retention in an hour, the others in a minute. What goes on for days is a bug, or a grant that the database's role lacks.
        EOT
      }
      erasure_overdue = {
        title    = "A compliance request is overdue"
        severity = "CRITICAL"
        query    = "sum(increase(${local.events}{event=\"privacy.overdue\"}[1d])) > 0"
        duration = "0s"
        runbook  = <<-EOT
          A request to show or to erase a customer's data is past its time, which Shopify and the law set. It is said once a day for as long as it is open.

          1. `python manage.py privacy list`, and `privacy show` for the one that the log of `${var.name}-retry` names: it says what is in the way.
          2. A tenant's database: restore the way to it. A request for data: `privacy export` answers it.
          3. By hand: docs/privacy.md.
        EOT
      }
      unforeseen = {
        title    = "A function failed"
        severity = "ERROR"
        query    = "sum by (service_name) (increase(${local.events}{event=\"function.failed\"}[10m])) > 0"
        duration = "0s"
        runbook  = <<-EOT
          `function.failed`: a setting is missing or wrong, or an error that nobody foresaw. The event has its cause and its stack.

          1. `ConfigurationError`: correct what it names, and apply.
          2. Anything else is a bug. If it came with the last deployment, undo that.
        EOT
      }
    },
    local.has_cloud_sql ? {
      database_connections = {
        title    = "The application database runs out of connections"
        severity = "ERROR"
        query    = "sum(cloudsql_googleapis_com:database_postgresql_num_backends{${local.database}}) > ${floor(var.database_max_connections * 0.8)}"
        duration = "300s"
        runbook  = <<-EOT
          More than 80 % of ${var.database_max_connections} connections are open.

          1. Who holds them: `select usename, client_addr, state, count(*) from pg_stat_activity group by 1, 2, 3`.
          2. The functions, because there are many: raise `database_max_connections` and, with it, `database.tier`.
          3. Somebody else: end what does not belong there.
        EOT
      }
      database_disk = {
        title    = "The application database's disk fills"
        severity = "ERROR"
        query    = "max(cloudsql_googleapis_com:database_disk_utilization{${local.database}}) > 0.9"
        duration = "900s"
        runbook  = <<-EOT
          The disk grows by itself; that it stays above 90 % says that it cannot.

          1. Raise the quota, or the disk, or see what grew: docs/capacity.md.
        EOT
      }
    } : {},
  )

  channels = concat(
    [for channel in google_monitoring_notification_channel.email : channel.name],
    var.notification_channels,
  )
}

resource "google_monitoring_notification_channel" "email" {
  for_each = var.alert_emails

  display_name = each.key
  type         = "email"
  labels       = { email_address = each.key }

  depends_on = [time_sleep.services]
}

# One counter for every log event, told apart by its labels: there are some thirty names.
resource "google_logging_metric" "events" {
  name        = "${var.name}/events"
  description = "Log events of the functions, by name"
  filter      = "resource.type=\"cloud_run_revision\" AND resource.labels.service_name=~\"^${var.name}-(webhook|subscriber|retry)$\" AND jsonPayload.message=~\"^[a-z]+[.][a-z_]+$\""

  label_extractors = {
    event   = "EXTRACT(jsonPayload.message)"
    status  = "EXTRACT(jsonPayload.status)"
    verdict = "EXTRACT(jsonPayload.verdict)"
  }

  metric_descriptor {
    metric_kind = "DELTA"
    value_type  = "INT64"
    unit        = "1"

    labels {
      key         = "event"
      description = "The event's name"
    }
    labels {
      key         = "status"
      description = "Of lease.expired: the failed event's status since"
    }
    labels {
      key         = "verdict"
      description = "Of replay.failed and replay.succeeded"
    }
  }

  depends_on = [time_sleep.services]
}

resource "google_logging_metric" "stored_milliseconds" {
  name            = "${var.name}/stored_milliseconds"
  description     = "How long an event took to be routed, parsed and stored"
  filter          = "resource.type=\"cloud_run_revision\" AND resource.labels.service_name=\"${var.name}-subscriber\" AND jsonPayload.message=\"event.stored\""
  value_extractor = "EXTRACT(jsonPayload.milliseconds)"

  metric_descriptor {
    metric_kind = "DELTA"
    value_type  = "DISTRIBUTION"
    unit        = "ms"
  }

  bucket_options {
    exponential_buckets {
      scale              = 1
      growth_factor      = 1.5
      num_finite_buckets = 30
    }
  }

  depends_on = [time_sleep.services]
}

resource "google_logging_metric" "lag_milliseconds" {
  name            = "${var.name}/lag_milliseconds"
  description     = "From our receipt of an event to its row in the tenant's database"
  filter          = "resource.type=\"cloud_run_revision\" AND resource.labels.service_name=\"${var.name}-subscriber\" AND jsonPayload.message=\"event.stored\""
  value_extractor = "EXTRACT(jsonPayload.lag_milliseconds)"

  metric_descriptor {
    metric_kind = "DELTA"
    value_type  = "DISTRIBUTION"
    unit        = "ms"
  }

  bucket_options {
    exponential_buckets {
      scale              = 10 # with the factor, up to 22 hours
      growth_factor      = 1.7
      num_finite_buckets = 30
    }
  }

  depends_on = [time_sleep.services]
}

resource "google_monitoring_alert_policy" "this" {
  for_each = local.alerts

  display_name          = "${var.name}: ${each.value.title}"
  severity              = each.value.severity
  combiner              = "OR"
  notification_channels = local.channels

  conditions {
    display_name = each.value.title

    condition_prometheus_query_language {
      query                     = each.value.query
      duration                  = each.value.duration
      evaluation_interval       = "60s"
      disable_metric_validation = true
    }
  }

  documentation {
    subject   = "${var.name} in ${var.project_id}: ${each.value.title}"
    content   = each.value.runbook
    mime_type = "text/markdown"
  }

  alert_strategy {
    auto_close = "1800s"
  }

  depends_on = [google_logging_metric.events, google_logging_metric.stored_milliseconds, google_logging_metric.lag_milliseconds]
}
