-- What operators are to know, and what each channel has been told of it.

-- One row for each channel and cause. It fires, is resolved, and may fire again.
create table notifier.alert_groups (
  channel text not null references notifier.channels on delete cascade,
  dedupe_key text not null,
  kind text not null check (kind in ('failed', 'incident', 'overdue', 'request', 'outbox')),
  about jsonb not null default '{}', -- the cause's own names; empty for what is counted together
  severity text not null check (severity in ('info', 'warning', 'error', 'critical')),
  state text not null default 'firing' check (state in ('firing', 'resolved')),
  first_seen timestamptz not null,
  last_seen timestamptz not null,
  total bigint not null,
  sample bigint[] not null default '{}' check (cardinality(sample) <= 5),
  fired_at timestamptz not null default now(),
  clear_since timestamptz, -- nothing of it is left since then; resolved if that lasts
  resolved_at timestamptz,
  -- What was told: the newest firing message, whether its verdict is awaited, whether one was sent.
  since_notified bigint not null,
  last_notified_at timestamptz,
  notified_severity text,
  notification_id bigint,
  is_pending boolean not null default false,
  is_told boolean not null default false,
  undelivered_at timestamptz, -- the last message reached nobody
  -- Silenced: nothing at all is told. Acknowledged: nothing but a rise of severity, and the end.
  quiet text check (quiet in ('silenced', 'acknowledged')),
  quiet_until timestamptz,
  quiet_by text,
  quiet_reason text,
  primary key (channel, dedupe_key),
  constraint resolved_has_time check ((state = 'resolved') = (resolved_at is not null)),
  constraint quiet_is_whole check (num_nulls(quiet, quiet_until, quiet_by, quiet_reason) in (0, 4))
);

-- Null: none. Otherwise a channel that has carried nothing for so long says that it is alive.
alter table notifier.channels add column heartbeat interval check (heartbeat >= interval '1 hour');

-- How much a channel has carried lately.
create index notifications_channel on notifier.notifications (channel, created_at);
