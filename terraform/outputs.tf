output "webhook_url" {
  description = "Where Shopify sends deliveries over HTTPS."
  value       = google_cloudfunctions2_function.this["webhook"].service_config[0].uri
}

output "shopify_pubsub_address" {
  description = "Where Shopify publishes by itself, past the webhook, if shopify_native_delivery is on."
  value       = var.shopify_native_delivery ? "pubsub://${var.project_id}:${google_pubsub_topic.events.name}" : null
}

output "shopify_app_toml" {
  description = "The webhooks section of shopify.app.toml: `terraform output -raw shopify_app_toml`."
  value = join("\n", concat(
    [
      "[webhooks]",
      "api_version = \"2026-04\"",
      "",
      "  [[webhooks.subscriptions]]",
      "  uri = \"${var.shopify_native_delivery ? "pubsub://${var.project_id}:${google_pubsub_topic.events.name}" : google_cloudfunctions2_function.this["webhook"].service_config[0].uri}\"",
      "  topics = [",
    ],
    [for topic in var.shopify_topics : "    \"${topic}\","],
    ["  ]"],
    # These three come over HTTPS, signed: Shopify demands it.
    var.public_webhook ? [
      "",
      "  [[webhooks.subscriptions]]",
      "  uri = \"${google_cloudfunctions2_function.this["webhook"].service_config[0].uri}\"",
      "  compliance_topics = [\"customers/data_request\", \"customers/redact\", \"shop/redact\"]",
    ] : [],
    [""],
  ))
}

output "function_urls" {
  description = "The address of each function. Only the webhook's answers to everybody."
  value       = { for name, function in google_cloudfunctions2_function.this : name => function.service_config[0].uri }
}

output "accounts" {
  description = "The account that each function runs as; tenants who admit by identity need them."
  value       = { for name in keys(local.functions) : name => google_service_account.this[name].email }
}

output "bundles" {
  description = "The bundle that each function was built from, by its hash."
  value       = { for name, bundle in google_storage_bucket_object.bundle : name => bundle.name }
}

output "static_egress_ip" {
  description = "The address to admit in tenants' firewalls, if there is a fixed one."
  value       = one(google_compute_address.egress[*].address)
}

output "database_connection_name" {
  description = "The Cloud SQL instance, as cloud-sql-proxy names it."
  value       = one(google_sql_database_instance.app[*].connection_name)
}

output "next_steps" {
  description = "The commands that connect the first shop: `terraform output -raw next_steps`."
  value = join("\n", concat(
    local.has_cloud_sql && var.operator_access == "proxy" ? [
      "# In a terminal of its own:",
      "cloud-sql-proxy --port 6432 ${google_sql_database_instance.app[0].connection_name}",
      "",
      "# The settings of the commands, as the functions have them, by way of the proxy:",
      "export APP_DATABASE_URL=\"postgresql://${google_sql_user.app[0].name}:$(gcloud secrets versions access latest --project ${var.project_id} --secret ${google_secret_manager_secret.database_password[0].secret_id})@127.0.0.1:6432/${google_sql_database.app[0].name}\"",
      ] : local.has_cloud_sql ? [
      "# From a machine in the network ${google_compute_network.this[0].name}: the database has no public address.",
      ] : [
      "# The settings of the commands, as the functions have them:",
    ],
    local.has_cloud_sql && var.operator_access == "proxy" ? [] : [
      "export APP_DATABASE_URL=\"$(gcloud secrets versions access latest --project ${var.project_id} --secret ${google_secret_manager_secret.this["APP_DATABASE_URL"].secret_id})\"",
    ],
    [
      "export CREDENTIAL_KEYS=\"$(gcloud secrets versions access latest --project ${var.project_id} --secret ${google_secret_manager_secret.this["CREDENTIAL_KEYS"].secret_id})\"",
      "export PRIVACY_HASH_KEY=\"$(gcloud secrets versions access latest --project ${var.project_id} --secret ${google_secret_manager_secret.this["PRIVACY_HASH_KEY"].secret_id})\"",
      "",
      "# One shop, its organization and its database:",
      "read -rs TENANT_DATABASE_URL && export TENANT_DATABASE_URL",
      "python manage.py connect_shop --shop SHOP.myshopify.com --organization ORGANIZATION",
      "",
    ],
  ))
}
