# What is deployed: each function's main.py with shared/ and requirements.txt beside it, taken from
# this tree. A bundle is named by its hash, so that a function is built again when one of its files
# has changed, and at no other time.

locals {
  root = "${path.module}/.."

  shared_files = [
    for file in fileset("${local.root}/shared", "**") : file
    if !strcontains(file, "__pycache__") && !strcontains(file, "/.") && !startswith(file, ".")
  ]
}

data "archive_file" "bundle" {
  for_each = toset(["webhook", "subscriber", "retry"])

  type             = "zip"
  output_path      = "${path.module}/build/${each.key}.zip"
  output_file_mode = "0644" # else the hash depends on this machine's umask

  source {
    filename = "main.py"
    content  = file("${local.root}/functions/${each.key}/main.py")
  }

  source {
    filename = "requirements.txt"
    content  = file("${local.root}/requirements.txt")
  }

  dynamic "source" {
    for_each = local.shared_files

    content {
      filename = "shared/${source.value}"
      content  = file("${local.root}/shared/${source.value}")
    }
  }
}

resource "google_storage_bucket" "bundles" {
  # checkov:skip=CKV_GCP_62: Who read a bundle is of no interest: it holds the published source and no secret. Cloud Audit Logs tell who wrote one.
  name                        = "${var.project_id}-${var.name}-bundles"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = true # bundles are made from the tree, again and again

  versioning {
    enabled = true
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      days_since_noncurrent_time = 90
    }
  }

  depends_on = [time_sleep.services]
}

resource "google_storage_bucket_object" "bundle" {
  for_each = data.archive_file.bundle

  bucket = google_storage_bucket.bundles.name
  name   = "${each.key}-${each.value.output_sha256}.zip"
  source = each.value.output_path

  lifecycle {
    create_before_destroy = true
  }
}

# The images that Cloud Build makes of the bundles. Without a repository of our own, they collect in
# one that nobody ever empties.
resource "google_artifact_registry_repository" "images" {
  # checkov:skip=CKV_GCP_84: Images hold the published source and no secret; Google's own keys encrypt them.
  location      = var.region
  repository_id = "${var.name}-images"
  description   = "Images of the functions, made from their bundles"
  format        = "DOCKER"

  cleanup_policies {
    id     = "delete-old"
    action = "DELETE"
    condition {
      older_than = "2592000s"
    }
  }

  cleanup_policies {
    id     = "keep-recent"
    action = "KEEP"
    most_recent_versions {
      keep_count = 5
    }
  }

  depends_on = [time_sleep.services]
}
