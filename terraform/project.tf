data "google_project" "this" {
  project_id = var.project_id
}

locals {
  services = concat(
    [
      "artifactregistry", "cloudbuild", "cloudfunctions", "cloudscheduler", "iam", "logging",
      "monitoring", "pubsub", "run", "secretmanager", "storage",
    ],
    local.has_network ? ["compute"] : [],
    local.has_cloud_sql ? ["servicenetworking", "sqladmin"] : [],
    local.has_connector ? ["vpcaccess"] : [],
  )

  # Google's own accounts, which act on the project's behalf.
  pubsub_agent = "serviceAccount:service-${data.google_project.this.number}@gcp-sa-pubsub.iam.gserviceaccount.com"
}

resource "google_project_service" "this" {
  for_each = toset(local.services)

  service = "${each.key}.googleapis.com"

  # Others in the project may use it too.
  disable_on_destroy = false
}

# A service that was enabled a moment ago still answers that it is not, and its agent's account
# may not exist yet.
resource "time_sleep" "services" {
  create_duration = "60s"

  triggers = {
    services = join(" ", sort(local.services))
  }

  depends_on = [google_project_service.this]
}
