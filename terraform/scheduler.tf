resource "google_cloud_scheduler_job" "retry" {
  name        = "${var.name}-retry"
  region      = var.region
  description = "Every minute: the outbox is sent, failed events that are due are replayed"
  schedule    = "* * * * *"
  time_zone   = "Etc/UTC"

  # Longer than the function may run: the scheduler then waits for its end, and no two runs overlap.
  attempt_deadline = "${var.retry.timeout_seconds + 60}s"

  # The next minute is the retry.
  retry_config {
    retry_count = 0
  }

  http_target {
    http_method = "POST"
    uri         = google_cloudfunctions2_function.this["retry"].service_config[0].uri

    oidc_token {
      service_account_email = google_service_account.this["tick"].email
      audience              = google_cloudfunctions2_function.this["retry"].service_config[0].uri
    }
  }

  # Who paused it, with `gcloud scheduler jobs pause`, had a reason.
  lifecycle {
    ignore_changes = [paused]
  }

  depends_on = [google_cloud_run_service_iam_member.tick_calls_retry]
}
