# The application database: a Cloud SQL instance, or somebody else's.

locals {
  has_cloud_sql = var.database_mode == "cloud_sql"

  # Letters and digits only, so that the password needs no escaping. TLS is what Cloud SQL demands;
  # its certificate's name is no host that functions know, so it is not compared.
  database_url = local.has_cloud_sql ? format(
    "postgresql://%s:%s@%s:5432/%s?sslmode=require",
    google_sql_user.app[0].name,
    ephemeral.google_secret_manager_secret_version.database_password[0].secret_data,
    google_sql_database_instance.app[0].private_ip_address,
    google_sql_database.app[0].name,
  ) : var.database_url
}

resource "google_sql_database_instance" "app" {
  count = local.has_cloud_sql ? 1 : 0

  # checkov:skip=CKV_GCP_6: ssl_mode refuses connections without TLS. Client certificates would be one more secret in three functions, beside a password that already is one.
  # checkov:skip=CKV_GCP_60: With operator_access "proxy" the instance has a public address that admits no network at all; only cloud-sql-proxy gets in, by IAM.
  # checkov:skip=CKV_GCP_79: A new major version is an upgrade to plan, not to slip in.
  # checkov:skip=CKV_GCP_52: Functions connect and disconnect all day; log lines without a reader.
  # checkov:skip=CKV_GCP_53: As for CKV_GCP_52.
  # checkov:skip=CKV_GCP_108: Functions have no host names.
  # checkov:skip=CKV_GCP_110: pgaudit would write statements, and with them payloads, into the log.
  # checkov:skip=CKV_GCP_111: log_statement would do the same.
  # checkov:skip=CKV2_GCP_13: Query insights have the durations, without a line for each statement.
  name                = var.name
  region              = var.region
  database_version    = "POSTGRES_17"
  deletion_protection = var.deletion_protection # Terraform's own; the one below is Google's

  settings {
    tier                        = var.database.tier
    edition                     = "ENTERPRISE" # the default since PostgreSQL 16 knows no such tier
    availability_type           = var.database.availability
    disk_type                   = "PD_SSD"
    disk_size                   = var.database.disk_size_gb
    disk_autoresize             = true
    deletion_protection_enabled = var.deletion_protection
    retain_backups_on_delete    = true

    # Not connector_enforcement: it would shut out psycopg, which the functions use.
    ip_configuration {
      private_network = google_compute_network.this[0].id
      ipv4_enabled    = var.operator_access == "proxy"
      ssl_mode        = "ENCRYPTED_ONLY"
    }

    backup_configuration {
      enabled                        = true
      start_time                     = "02:00"
      point_in_time_recovery_enabled = true
      transaction_log_retention_days = 7 # the edition's maximum

      backup_retention_settings {
        retained_backups = var.database.retained_backups
      }
    }

    insights_config {
      query_insights_enabled  = true
      query_string_length     = 1024
      record_application_tags = false
      record_client_address   = false
    }

    maintenance_window {
      day          = 7
      hour         = 3
      update_track = "stable"
    }

    database_flags {
      name  = "log_checkpoints"
      value = "on"
    }

    database_flags {
      name  = "log_lock_waits"
      value = "on"
    }

    database_flags {
      name  = "log_min_error_statement"
      value = "error"
    }

    database_flags {
      name  = "log_min_messages"
      value = "warning"
    }

    database_flags {
      name  = "log_temp_files"
      value = "0"
    }

    database_flags {
      name  = "max_connections"
      value = tostring(var.database_max_connections)
    }
  }

  lifecycle {
    ignore_changes = [settings[0].disk_size] # it has grown by itself
  }

  depends_on = [google_service_networking_connection.services]
}

resource "google_sql_database" "app" {
  count = local.has_cloud_sql ? 1 : 0

  name     = "hookledger"
  instance = google_sql_database_instance.app[0].name

  deletion_policy = "ABANDON" # it goes with its instance; by itself PostgreSQL refuses while in use
}

# The password, in the order that survives an apply that dies halfway: a random one is written to a
# secret; the user, and the address that functions read, both take it from there.

ephemeral "random_password" "database" {
  count = local.has_cloud_sql ? 1 : 0

  length  = 40
  special = false
}

resource "google_secret_manager_secret" "database_password" {
  count = local.has_cloud_sql ? 1 : 0

  secret_id           = "${var.name}-database-password"
  deletion_protection = var.deletion_protection

  replication {
    user_managed {
      replicas {
        location = var.region
      }
    }
  }

  depends_on = [time_sleep.services]
}

resource "google_secret_manager_secret_version" "database_password" {
  count = local.has_cloud_sql ? 1 : 0

  secret                 = google_secret_manager_secret.database_password[0].id
  secret_data_wo         = ephemeral.random_password.database[0].result
  secret_data_wo_version = var.database_password_version
  deletion_policy        = "DISABLE"

  lifecycle {
    create_before_destroy = true
  }
}

ephemeral "google_secret_manager_secret_version" "database_password" {
  provider = google.reading_back
  count    = local.has_cloud_sql ? 1 : 0

  secret  = google_secret_manager_secret.database_password[0].id
  version = google_secret_manager_secret_version.database_password[0].version
}

resource "google_sql_user" "app" {
  count = local.has_cloud_sql ? 1 : 0

  name                = "hookledger"
  instance            = google_sql_database_instance.app[0].name
  password_wo         = ephemeral.google_secret_manager_secret_version.database_password[0].secret_data
  password_wo_version = var.database_password_version

  deletion_policy = "ABANDON" # PostgreSQL does not drop a role that owns tables
}
