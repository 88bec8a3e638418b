-- The application database: who is connected, how their database is reached, what was received,
-- and what could not be stored yet. The names are those of the earlier system.

create table shopify_shopifyconnection (
  id bigint generated always as identity primary key,
  organization_id text not null,
  myshopify_domain text not null,
  status text not null default 'active' check (status in ('active', 'uninstalled', 'disconnected')),
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);
-- Not unique on purpose: two matches are a case that routing handles and reports.
create index shopify_shopifyconnection_domain on shopify_shopifyconnection (myshopify_domain);

create table databases_database (
  id bigint generated always as identity primary key,
  organization_id text not null,
  type text not null,
  database_name text not null,
  deleted_at timestamptz
);
create index databases_database_organization on databases_database (organization_id);

create table databases_databasecredential (
  id bigint generated always as identity primary key,
  database_id bigint not null unique references databases_database (id) on delete cascade,
  host text not null,
  port integer not null default 5432,
  username text not null,
  password_encrypted text,
  password_ref text,
  sslmode text not null default 'require',
  pooler_mode text not null default 'none' check (pooler_mode in ('none', 'session', 'transaction')),
  check (num_nonnulls(password_encrypted, password_ref) = 1)
);

create table shopify_shopifyevent (
  id bigint generated always as identity primary key,
  organization_id text,
  topic text not null,
  shop_domain text not null,
  payload jsonb,
  event_id text not null,
  payload_sha256 bytea not null,
  triggered_at timestamptz,
  received_at timestamptz not null,
  needs_publish boolean not null default false,
  outbox_envelope jsonb,
  outbox_body bytea,
  unique (shop_domain, event_id)
);

create table subscriber_subscriberfailedevent (
  id bigint generated always as identity primary key,
  event_id text not null,
  payload_sha256 bytea not null,
  source text not null check (source in ('webhook', 'pubsub')),
  topic text not null,
  event_type text not null,
  shop_domain text not null,
  organization_id text,
  envelope jsonb not null,
  payload bytea,
  error_type text not null,
  error_class text not null check (error_class in ('transient', 'permanent')),
  error_code text not null,
  error_message text not null,
  traceback text not null,
  fingerprint text not null,
  status text not null default 'pending' check (status in ('pending', 'resolved', 'failed')),
  retry_count integer not null default 0 check (retry_count >= 0),
  max_retries integer not null default 5 check (max_retries >= 1),
  next_retry_at timestamptz,
  last_attempted_at timestamptz,
  resolved_at timestamptz,
  resolution text,
  occurrences integer not null default 1,
  lease_token uuid,
  leased_until timestamptz,
  alerted_at timestamptz,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  redacted_at timestamptz,
  due_at timestamptz generated always as (coalesce(next_retry_at, created_at)) stored,
  tenant text collate "C" generated always as (coalesce(organization_id, shop_domain)) stored,
  unique (shop_domain, event_id),
  constraint resolved_has_time check ((status = 'resolved') = (resolved_at is not null)),
  constraint resolved_has_reason check ((status = 'resolved') = (resolution is not null)),
  constraint only_pending_is_scheduled check (status = 'pending' or next_retry_at is null),
  constraint only_pending_is_leased check (status = 'pending' or lease_token is null),
  constraint lease_is_whole check ((lease_token is null) = (leased_until is null)),
  constraint payload_or_redacted check (payload is not null or redacted_at is not null)
);
create index subscriber_failedevent_due
  on subscriber_subscriberfailedevent (due_at, id) where status = 'pending' and lease_token is null;
create index subscriber_failedevent_lease
  on subscriber_subscriberfailedevent (leased_until) where lease_token is not null;
create index subscriber_failedevent_alert
  on subscriber_subscriberfailedevent (updated_at) where status = 'failed' and alerted_at is null;

create table subscriber_replayattempt (
  id bigint generated always as identity primary key,
  failed_event_id bigint not null
    references subscriber_subscriberfailedevent (id) on delete cascade,
  attempt integer not null,
  lease_token uuid not null,
  started_at timestamptz not null,
  finished_at timestamptz,
  outcome text check (outcome in ('resolved', 'rescheduled', 'failed', 'lost')),
  error_type text,
  error_message text,
  constraint finished_has_outcome check ((finished_at is null) = (outcome is null))
);
create index subscriber_replayattempt_event on subscriber_replayattempt (failed_event_id, id);
create unique index subscriber_replayattempt_open
  on subscriber_replayattempt (failed_event_id) where finished_at is null;
