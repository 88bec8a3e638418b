# Values are ephemeral: they go from the operator to Secret Manager and are in no state and no plan.
# Functions name a version by number, so a rotation makes a revision, and an instance that starts
# later than its neighbours reads what they read.

locals {
  # By the environment variable that holds it: the secret's name, who reads it, and which writing
  # of it this is.
  secrets = merge(local.notifier_secrets, {
    APP_DATABASE_URL = {
      name    = "app-database-url"
      readers = ["webhook", "subscriber", "retry"]
      version = var.database_password_version
    }
    CREDENTIAL_KEYS = {
      name    = "credential-keys"
      readers = ["subscriber", "retry"]
      version = var.credential_keys_version
    }
    PRIVACY_HASH_KEY = {
      name    = "privacy-hash-key"
      readers = ["subscriber", "retry"]
      version = var.privacy_hash_key_version
    }
    SHOPIFY_CLIENT_SECRETS = {
      name    = "shopify-client-secrets"
      readers = ["webhook"]
      version = var.shopify_client_secrets_version
    }
  })

  # What the notifier's profiles refer to as `_env:NOTIFIER_…`.
  notifier_secrets = {
    for name, version in var.notifier_secrets : name => {
      name    = replace(lower(name), "_", "-")
      readers = ["retry"]
      version = version
    }
  }

  secret_values = merge(coalesce(var.notifier_secret_values, {}), {
    APP_DATABASE_URL       = local.database_url
    CREDENTIAL_KEYS        = coalesce(var.credential_keys, local.new_credential_key)
    PRIVACY_HASH_KEY       = coalesce(var.privacy_hash_key, ephemeral.random_password.privacy_hash_key.result)
    SHOPIFY_CLIENT_SECRETS = var.shopify_client_secrets
  })

  secret_readers = merge([
    for key, secret in local.secrets : {
      for function in secret.readers : "${function} ${secret.name}" => { secret = key, function = function }
    }
  ]...)

  # 32 bytes in url-safe base64 are a Fernet key. Of the password, they have all the randomness.
  new_credential_key = replace(replace(base64sha256(ephemeral.random_password.credential_key.result), "+", "-"), "/", "_")
}

ephemeral "random_password" "credential_key" {
  length  = 64
  special = false
}

ephemeral "random_password" "privacy_hash_key" {
  length  = 64
  special = false
}

resource "google_secret_manager_secret" "this" {
  for_each = local.secrets

  secret_id           = "${var.name}-${each.value.name}"
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

resource "google_secret_manager_secret_version" "this" {
  for_each = local.secrets

  secret                 = google_secret_manager_secret.this[each.key].id
  secret_data_wo         = local.secret_values[each.key]
  secret_data_wo_version = each.value.version

  # First the new version, then the revision that reads it; the old one is disabled at last and can
  # be enabled again for a rollback. To destroy it here would be for ever.
  deletion_policy = "DISABLE"

  lifecycle {
    create_before_destroy = true
  }
}
