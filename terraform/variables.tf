# Where it runs

variable "project_id" {
  description = "The Google Cloud project that everything is made in."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id))
    error_message = "project_id is the project's id (6 to 30 lower-case letters, digits, hyphens), not its name or number. `gcloud projects list` shows it."
  }
}

variable "region" {
  description = "The region of functions, database, bundles and stored messages, e.g. `europe-west1`."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "region is a region such as europe-west1, not a zone such as europe-west1-b."
  }
}

variable "name" {
  description = "The beginning of every resource's name. Two deployments in one project need two names."
  type        = string
  default     = "hookledger"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,16}[a-z0-9]$", var.name))
    error_message = "name has 3 to 18 lower-case letters, digits and hyphens: accounts are named after it, and their names end at 30 characters."
  }
}

variable "deletion_protection" {
  description = "Whether Google refuses to delete the database and the secrets. Set it to false, and apply, before a destroy."
  type        = bool
  default     = true
  nullable    = false
}

# Secrets: ephemeral, so that no value reaches the state or a plan. A value is written when its
# version number changes, and only then.

variable "shopify_client_secrets" {
  description = "The Shopify app's client secret; several, comma-separated, for several apps or while rotating."
  type        = string
  nullable    = false
  ephemeral   = true
  sensitive   = true

  validation {
    condition     = length(compact([for secret in split(",", var.shopify_client_secrets) : trimspace(secret)])) > 0
    error_message = "shopify_client_secrets is empty. It is the client secret on the app's page in Shopify's developer dashboard; set it as TF_VAR_shopify_client_secrets."
  }
}

variable "shopify_client_secrets_version" {
  description = "Raise it by one to write a new value of shopify_client_secrets."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.shopify_client_secrets_version >= 1 && floor(var.shopify_client_secrets_version) == var.shopify_client_secrets_version
    error_message = "shopify_client_secrets_version is a whole number of at least 1, raised by one at each rotation."
  }
}

variable "credential_keys" {
  description = "Fernet keys for the tenants' passwords, comma-separated: the first encrypts, all decrypt. Null: one is made at the first apply."
  type        = string
  default     = null
  ephemeral   = true
  sensitive   = true

  validation {
    condition     = var.credential_keys_version == 1 || var.credential_keys != null
    error_message = "With credential_keys_version above 1, credential_keys must hold the new key and, after a comma, the old one: what was encrypted with a key that is missing is lost."
  }

  validation {
    condition     = var.credential_keys == null || alltrue([for key in split(",", coalesce(var.credential_keys, "-")) : can(regex("^[A-Za-z0-9_-]{43}=$", trimspace(key)))])
    error_message = "Every part of credential_keys must be a Fernet key: 44 characters of url-safe base64 that end in `=`."
  }
}

variable "credential_keys_version" {
  description = "Raise it by one to write a new value of credential_keys."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.credential_keys_version >= 1 && floor(var.credential_keys_version) == var.credential_keys_version
    error_message = "credential_keys_version is a whole number of at least 1, raised by one at each rotation."
  }
}

variable "privacy_hash_key" {
  description = "Long random texts that key the hashes of who was erased, comma-separated: the first makes new hashes, all find old ones. Null: one is made at the first apply."
  type        = string
  default     = null
  ephemeral   = true
  sensitive   = true

  validation {
    condition     = var.privacy_hash_key_version == 1 || var.privacy_hash_key != null
    error_message = "With privacy_hash_key_version above 1, privacy_hash_key must hold the new key and, after a comma, the old one: without it nobody who was erased is recognised, and old events bring them back."
  }

  validation {
    condition     = var.privacy_hash_key == null || alltrue([for key in split(",", coalesce(var.privacy_hash_key, "-")) : length(trimspace(key)) >= 32])
    error_message = "Every part of privacy_hash_key must have at least 32 characters: `openssl rand -hex 32` makes one."
  }
}

variable "privacy_hash_key_version" {
  description = "Raise it by one to write a new value of privacy_hash_key."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.privacy_hash_key_version >= 1 && floor(var.privacy_hash_key_version) == var.privacy_hash_key_version
    error_message = "privacy_hash_key_version is a whole number of at least 1, raised by one at each rotation."
  }
}

variable "notifier_secrets" {
  description = "What the notifier's profiles refer to, by name, each with the version of its value: `{ NOTIFIER_SMTP_PASSWORD = 1 }`. A profile says `_env:NOTIFIER_SMTP_PASSWORD`. Raise the number by one to write a new value."
  type        = map(number)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for name in keys(var.notifier_secrets) : can(regex("^NOTIFIER_[A-Z0-9_]+$", name)) && !contains(["NOTIFIER_ALERT_CHANNEL", "NOTIFIER_FALLBACK_CHANNEL", "NOTIFIER_TIME_BUDGET_SECONDS"], name)])
    error_message = "Each of notifier_secrets is named NOTIFIER_ and then capitals, digits or underscores, and is no setting: a profile can refer to no other."
  }

  validation {
    condition     = alltrue([for version in values(var.notifier_secrets) : version >= 1 && floor(version) == version])
    error_message = "The versions of notifier_secrets are whole numbers of at least 1, raised by one at each rotation."
  }
}

variable "notifier_secret_values" {
  description = "The values of notifier_secrets, by the same names."
  type        = map(string)
  default     = null
  ephemeral   = true
  sensitive   = true

  validation {
    condition     = alltrue([for name in keys(var.notifier_secrets) : length(trimspace(lookup(coalesce(var.notifier_secret_values, {}), name, ""))) > 0])
    error_message = "notifier_secret_values lacks the value of one of notifier_secrets. It is not kept: give it at every apply, or in a .auto.tfvars that stays with you."
  }
}

# Shopify

variable "shopify_topics" {
  description = "The topics of the `shopify.app.toml` snippet among the outputs."
  type        = list(string)
  default = [
    "app/uninstalled",
    "checkouts/create", "checkouts/delete", "checkouts/update",
    "collections/create", "collections/delete", "collections/update",
    "customers/create", "customers/delete", "customers/disable", "customers/enable", "customers/update",
    "draft_orders/create", "draft_orders/delete", "draft_orders/update",
    "fulfillments/create", "fulfillments/update",
    "inventory_items/create", "inventory_items/delete", "inventory_items/update",
    "inventory_levels/connect", "inventory_levels/disconnect", "inventory_levels/update",
    "locations/activate", "locations/create", "locations/deactivate", "locations/delete", "locations/update",
    "order_transactions/create",
    "orders/cancelled", "orders/create", "orders/delete", "orders/fulfilled", "orders/paid", "orders/partially_fulfilled", "orders/updated",
    "products/create", "products/delete", "products/update",
    "refunds/create",
    "shop/update",
  ]
  nullable = false

  validation {
    condition     = alltrue([for topic in var.shopify_topics : can(regex("^[a-z_]+[/.][a-z_]+$", topic))])
    error_message = "shopify_topics holds Shopify's topic names in the form orders/create."
  }
}

variable "public_webhook" {
  description = "Whether anybody may call the webhook, as Shopify must. False where an organization policy forbids allUsers: then use Shopify's native delivery."
  type        = bool
  default     = true
  nullable    = false

  validation {
    condition     = var.public_webhook || var.shopify_native_delivery
    error_message = "With public_webhook and shopify_native_delivery both false no event gets in. Set one of them to true."
  }
}

variable "shopify_native_delivery" {
  description = "Whether Shopify's own account may publish to the topic."
  type        = bool
  default     = true
  nullable    = false
}

# Functions

variable "runtime" {
  description = "The functions' language runtime."
  type        = string
  default     = "python313"
  nullable    = false

  validation {
    condition     = contains(["python311", "python312", "python313", "python314"], var.runtime)
    error_message = "runtime must be one of python311, python312, python313, python314: those that the code runs on."
  }
}

variable "webhook" {
  description = "The webhook function's size. `concurrency` is its number of threads too."
  type = object({
    cpu             = optional(string, "1")
    memory          = optional(string, "512Mi")
    concurrency     = optional(number, 16)
    min_instances   = optional(number, 1) # a cold start takes seconds, of which Shopify has five
    max_instances   = optional(number, 10)
    timeout_seconds = optional(number, 10)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.webhook.concurrency == 1 || try(tonumber(var.webhook.cpu) >= 1, false)
    error_message = "webhook.concurrency above 1 needs webhook.cpu of at least \"1\": Cloud Run refuses it otherwise."
  }

  validation {
    condition     = var.webhook.min_instances >= 0 && var.webhook.min_instances <= var.webhook.max_instances && var.webhook.max_instances >= 1
    error_message = "webhook.min_instances must be between 0 and webhook.max_instances."
  }

  validation {
    condition     = var.webhook.timeout_seconds >= 5
    error_message = "webhook.timeout_seconds must be at least 5: the webhook answers within 4.5 s, and must not be cut off while it does."
  }
}

variable "subscriber" {
  description = "The subscriber function's size. `concurrency` is its number of threads too."
  type = object({
    cpu             = optional(string, "1")
    memory          = optional(string, "512Mi")
    concurrency     = optional(number, 8)
    min_instances   = optional(number, 1) # a new instance waits for its network
    max_instances   = optional(number, 10)
    timeout_seconds = optional(number, 30)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.subscriber.concurrency == 1 || try(tonumber(var.subscriber.cpu) >= 1, false)
    error_message = "subscriber.concurrency above 1 needs subscriber.cpu of at least \"1\": Cloud Run refuses it otherwise."
  }

  validation {
    condition     = var.subscriber.min_instances >= 0 && var.subscriber.min_instances <= var.subscriber.max_instances && var.subscriber.max_instances >= 1
    error_message = "subscriber.min_instances must be between 0 and subscriber.max_instances."
  }

  validation {
    condition     = var.subscriber.timeout_seconds < var.ack_deadline_seconds
    error_message = "subscriber.timeout_seconds must be less than ack_deadline_seconds: Pub/Sub would deliver a message again that is still being worked on. Lower the one or raise the other."
  }
}

# One instance and one request at a time, always: a second run would only wait for the first one's
# leases. So neither is a variable.
variable "retry" {
  description = "The retry function's size. There is never more than one instance."
  type = object({
    cpu             = optional(string, "1")
    memory          = optional(string, "512Mi")
    min_instances   = optional(number, 0)
    timeout_seconds = optional(number, 240)
  })
  default  = {}
  nullable = false

  validation {
    condition     = contains([0, 1], var.retry.min_instances)
    error_message = "retry.min_instances is 0 or 1: there is never more than one instance."
  }

  validation {
    condition     = var.retry.timeout_seconds <= 1740
    error_message = "retry.timeout_seconds must be at most 1740: Cloud Scheduler waits for 30 minutes at most, and must wait longer than the function runs."
  }

  validation {
    condition     = var.retry.timeout_seconds >= local.retry_seconds_needed
    error_message = "retry.timeout_seconds must be at least ${local.retry_seconds_needed}: retry_time_budget_seconds and maintenance_time_budget_seconds, or notifier_time_budget_seconds and ${local.notifier_attempt_seconds} s for its last attempt, whichever is more; and ${local.retry_margin_seconds} s for waiting for the network and for finishing what was started. Raise it, or lower a budget."
  }
}

variable "retry_time_budget_seconds" {
  description = "No replay starts after this long in one run."
  type        = number
  default     = 50
  nullable    = false

  validation {
    condition     = var.retry_time_budget_seconds >= 1
    error_message = "retry_time_budget_seconds is a whole number of at least 1."
  }
}

variable "notifier_alert_channel" {
  description = "The notifier's channel that alerts go to: made with `manage.py channels add`."
  type        = string
  default     = "ops"
  nullable    = false
}

variable "notifier_fallback_channel" {
  description = "The notifier's channel that hears of alerts which could not be delivered. Empty: none."
  type        = string
  default     = ""
  nullable    = false
}

variable "notifier_time_budget_seconds" {
  description = "No notification is sent after this long in one run, which goes on beside the replays."
  type        = number
  default     = 50
  nullable    = false

  validation {
    condition     = var.notifier_time_budget_seconds >= 1
    error_message = "notifier_time_budget_seconds is a whole number of at least 1."
  }
}

variable "maintenance_time_budget_seconds" {
  description = "No step of retention's work starts after this long in one run. It begins after the replays."
  type        = number
  default     = 20
  nullable    = false

  validation {
    condition     = var.maintenance_time_budget_seconds >= 1
    error_message = "maintenance_time_budget_seconds is a whole number of at least 1."
  }
}

variable "lease_seconds" {
  description = "How long a claimed failed event belongs to the run that claimed it."
  type        = number
  default     = 120
  nullable    = false

  validation {
    condition     = var.lease_seconds > var.retry_time_budget_seconds
    error_message = "lease_seconds must exceed retry_time_budget_seconds: the last row of a claim may start only then, and would belong to nobody."
  }
}

variable "tenant_pool_size" {
  description = "Connections that one instance keeps to one tenant database."
  type        = number
  default     = 4
  nullable    = false

  validation {
    condition     = var.tenant_pool_size >= 1 && var.tenant_pool_size < max(var.subscriber.concurrency, 2)
    error_message = "tenant_pool_size must be at least 1 and less than subscriber.concurrency: otherwise one slow tenant takes every thread of an instance."
  }
}

variable "auto_migrate" {
  description = "Whether the retry function applies pending application migrations. If not, run `manage.py migrate` after each apply."
  type        = bool
  default     = true
  nullable    = false
}

variable "log_level" {
  description = "The least severe log events that are written. Above INFO the metrics of events that went well stay empty, and `retry not run` would alert."
  type        = string
  default     = "INFO"
  nullable    = false

  validation {
    condition     = contains(["DEBUG", "INFO"], var.log_level)
    error_message = "log_level must be DEBUG or INFO: alerts and dashboard read the INFO events."
  }
}

variable "settings" {
  description = "Further settings of all functions, as in docs/configuration.md: `{ REPLAY_PARALLELISM = \"16\" }`. Where a value is a reference to a secret, give the functions' accounts access to it."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for name in keys(var.settings) : can(regex("^[A-Z][A-Z0-9_]*$", name))])
    error_message = "settings has names in capitals, as docs/configuration.md lists them."
  }

  validation {
    condition     = alltrue([for name, value in var.settings : startswith(value, "_secret:") || !can(regex("SECRET|PASSWORD|TOKEN|KEY|DATABASE_URL|DSN", name)) && !can(regex("://[^/@]*:[^/@]*@|^shpss_", value))])
    error_message = "settings would show a secret to everybody who may look at the function. Put it into Secret Manager and give a reference: _secret:projects/P/secrets/S/versions/V."
  }

  validation {
    condition     = length(setintersection(keys(var.settings), local.managed_settings)) == 0
    error_message = "settings holds ${join(", ", setintersection(keys(var.settings), local.managed_settings))}, which this configuration sets itself. Use the variable of that name, or leave it."
  }
}

# Pub/Sub

variable "ack_deadline_seconds" {
  description = "How long Pub/Sub waits for the subscriber's answer before it delivers again."
  type        = number
  default     = 60
  nullable    = false

  validation {
    condition     = var.ack_deadline_seconds >= 10 && var.ack_deadline_seconds <= 600
    error_message = "ack_deadline_seconds must be between 10 and 600: those are Pub/Sub's limits."
  }
}

variable "pubsub_retention_days" {
  description = "How long Pub/Sub keeps a message: for a subscriber that is down, and for seeking back after a restore."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.pubsub_retention_days >= 1 && var.pubsub_retention_days <= 31
    error_message = "pubsub_retention_days must be between 1 and 31: those are Pub/Sub's limits."
  }
}

variable "dead_letter_retention_days" {
  description = "How long Pub/Sub keeps a message that it gave up delivering."
  type        = number
  default     = 14
  nullable    = false

  validation {
    condition     = var.dead_letter_retention_days >= 1 && var.dead_letter_retention_days <= 31
    error_message = "dead_letter_retention_days must be between 1 and 31: those are Pub/Sub's limits."
  }

  validation {
    condition     = 2 * var.pubsub_retention_days + var.dead_letter_retention_days <= 30
    error_message = "A message may live for ${2 * var.pubsub_retention_days + var.dead_letter_retention_days} days: twice pubsub_retention_days, since a dead letter may be published again, and dead_letter_retention_days. Shopify wants a customer erased within 30, and a message cannot be erased singly. Lower one of them."
  }
}

# Retention

variable "retention" {
  description = "After how many days things go from the databases, as in docs/configuration.md. Null keeps them."
  type = object({
    resolved_payload_days = optional(number, 30)
    resolved_days         = optional(number)
    audit_days            = optional(number)
    event_payload_days    = optional(number)
  })
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for days in values(var.retention) : days == null || try(days >= 1 && floor(days) == days, false)])
    error_message = "retention holds whole numbers of days, of at least 1; null keeps things for ever."
  }

  validation {
    condition     = var.retention.resolved_payload_days == null || coalesce(var.retention.resolved_payload_days, 0) <= 30
    error_message = "retention.resolved_payload_days must be at most 30: Shopify wants a customer erased within 30 days."
  }

  validation {
    condition = alltrue([
      for days in [var.retention.resolved_days, var.retention.audit_days] :
      days == null || coalesce(days, 0) >= local.message_lifetime_days
    ])
    error_message = "retention.resolved_days and retention.audit_days must be null or at least ${local.message_lifetime_days}: a message can come back for that long (twice pubsub_retention_days, and dead_letter_retention_days), and would be taken for a new one. Raise them, or lower those."
  }
}

# Application database

variable "database_mode" {
  description = "`cloud_sql` makes the application database, `external` takes the one of database_url."
  type        = string
  default     = "cloud_sql"
  nullable    = false

  validation {
    condition     = contains(["cloud_sql", "external"], var.database_mode)
    error_message = "database_mode must be cloud_sql or external."
  }
}

variable "database_url" {
  description = "With database_mode external: the application database's address, PostgreSQL 15 or newer."
  type        = string
  default     = null
  ephemeral   = true
  sensitive   = true

  validation {
    condition     = (var.database_mode == "external") == (var.database_url != null)
    error_message = "database_mode external needs database_url, as TF_VAR_database_url; with cloud_sql it must not be set: the address is then made here."
  }

  validation {
    condition     = var.database_url == null || can(regex("^postgres(ql)?://[^:@/]+:[^@]+@[^/]+/.+", coalesce(var.database_url, "-")))
    error_message = "database_url must look like postgresql://USER:PASSWORD@HOST:5432/DATABASE."
  }
}

variable "database_password_version" {
  description = "Raise it by one to write a new database_url or, with cloud_sql, to make a new password."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.database_password_version >= 1 && floor(var.database_password_version) == var.database_password_version
    error_message = "database_password_version is a whole number of at least 1, raised by one at each rotation."
  }
}

variable "database_pooler_mode" {
  description = "The pooler in front of the application database: `none`, `session` or `transaction`."
  type        = string
  default     = "none"
  nullable    = false

  validation {
    condition     = contains(["none", "session", "transaction"], var.database_pooler_mode)
    error_message = "database_pooler_mode must be none, session or transaction."
  }
}

variable "database_max_connections" {
  description = "How many connections the application database, or the pooler in front of it, admits. With cloud_sql it is set."
  type        = number
  default     = 300
  nullable    = false

  validation {
    condition     = local.connections_needed <= var.database_max_connections
    error_message = "The functions may open ${local.connections_needed} connections while two revisions overlap, but database_max_connections is ${var.database_max_connections}. Lower webhook.max_instances or subscriber.max_instances, or raise database_max_connections and with it database.tier."
  }
}

variable "database" {
  description = "The Cloud SQL instance. `availability` is ZONAL or REGIONAL; REGIONAL has a standby and costs twice as much."
  type = object({
    tier             = optional(string, "db-custom-1-3840")
    availability     = optional(string, "ZONAL")
    disk_size_gb     = optional(number, 10) # it grows by itself
    retained_backups = optional(number, 14)
  })
  default  = {}
  nullable = false

  validation {
    condition     = can(regex("^db-(custom-[0-9]+-[0-9]+|f1-micro|g1-small)$", var.database.tier))
    error_message = "database.tier must be of the Enterprise edition: db-custom-CPUS-MEGABYTES, db-g1-small or db-f1-micro. The db-perf-optimized tiers belong to another edition."
  }

  validation {
    condition     = contains(["ZONAL", "REGIONAL"], var.database.availability)
    error_message = "database.availability must be ZONAL or REGIONAL."
  }
}

variable "operator_access" {
  description = "How an operator reaches the Cloud SQL instance: `proxy` gives it a public address that admits cloud-sql-proxy only, `none` does not."
  type        = string
  default     = "proxy"
  nullable    = false

  validation {
    condition     = contains(["proxy", "none"], var.operator_access)
    error_message = "operator_access must be proxy or none. Where the policy sql.restrictPublicIp holds, it must be none."
  }
}

# Network

variable "egress_mode" {
  description = "How functions enter the network: `direct`, or through a `connector`, which costs two small machines and starts without a wait."
  type        = string
  default     = "direct"
  nullable    = false

  validation {
    condition     = contains(["direct", "connector"], var.egress_mode)
    error_message = "egress_mode must be direct or connector."
  }
}

variable "network_ranges" {
  description = "Address ranges that must not collide with networks that are peered: of the functions (/26 or larger) and of the connector (/28)."
  type = object({
    functions = optional(string, "10.61.0.0/26")
    connector = optional(string, "10.61.1.0/28")
  })
  default  = {}
  nullable = false

  validation {
    condition     = can(cidrhost(var.network_ranges.functions, 0)) && try(tonumber(split("/", var.network_ranges.functions)[1]) <= 26, false)
    error_message = "network_ranges.functions must be an address range of at least /26, such as 10.61.0.0/26: two revisions of all instances need that many addresses."
  }

  validation {
    condition     = can(cidrhost(var.network_ranges.connector, 0)) && endswith(var.network_ranges.connector, "/28")
    error_message = "network_ranges.connector must be an address range of exactly /28, such as 10.61.1.0/28."
  }
}

variable "static_egress_ip" {
  description = "Whether functions reach the internet from one fixed address, for tenants whose databases admit known addresses only."
  type        = bool
  default     = false
  nullable    = false
}

variable "static_egress_functions" {
  description = "With static_egress_ip: the functions that use it. Add `webhook` only if an external application database admits known addresses only: its starts become slower."
  type        = set(string)
  default     = ["subscriber", "retry"]
  nullable    = false

  validation {
    condition     = length(setsubtract(var.static_egress_functions, ["webhook", "subscriber", "retry"])) == 0
    error_message = "static_egress_functions holds webhook, subscriber, retry, or some of them."
  }
}

# Monitoring

variable "alert_emails" {
  description = "E-mail addresses that alerts go to."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for address in var.alert_emails : can(regex("^[^@\\s]+@[^@\\s]+$", address))])
    error_message = "alert_emails holds e-mail addresses, such as operator@example.com."
  }
}

variable "notification_channels" {
  description = "Further notification channels that exist already: projects/P/notificationChannels/N."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for channel in var.notification_channels : can(regex("^projects/[^/]+/notificationChannels/[^/]+$", channel))])
    error_message = "notification_channels holds full names: projects/P/notificationChannels/N. `gcloud beta monitoring channels list` shows them."
  }
}
