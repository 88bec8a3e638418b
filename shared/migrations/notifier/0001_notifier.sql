-- Notifications to operators. `pgrelay` is the relay: who is registered, and the queue of what is to
-- be done. It outlives `notifier`, the component, so that an event whose component is gone is still
-- found and answered.

create schema if not exists pgrelay;

create table if not exists pgrelay.registry (
  component text primary key,
  schema_name text not null,
  interface_version integer not null,
  package_version text not null,
  installed_at timestamptz not null default now(),
  uninstalled_at timestamptz -- on purpose: nothing installs it again by itself
);

-- One row. Whoever processes the queue reads the registry again when the generation has grown.
create table if not exists pgrelay.reload_state (
  id boolean primary key default true check (id),
  generation bigint not null default 1,
  requested_at timestamptz not null default now()
);
insert into pgrelay.reload_state default values on conflict do nothing;

create or replace function pgrelay.request_reload() returns bigint
language sql security definer set search_path = pg_catalog, pg_temp
as $$
  with asked as (
    update pgrelay.reload_state set generation = generation + 1, requested_at = now()
    returning generation
  )
  select generation from asked, lateral pg_notify('pgrelay_reload', generation::text)
$$;

-- No foreign key: an event whose notification is unknown must arrive, and be answered.
create table if not exists pgrelay.queue (
  id bigint generated always as identity primary key,
  event text not null default 'notify',
  notification_id bigint not null,
  attempt integer not null check (attempt > 0),
  lane text not null default '', -- the channel: whoever is busy with one leaves its events
  due_at timestamptz not null default now(),
  expire_at timestamptz,
  claimed_by text,
  lease_token uuid,
  leased_until timestamptz,
  started_at timestamptz, -- from here on the attempt counts, whatever becomes of its processor
  done_at timestamptz,
  outcome text check (outcome in ('sent', 'retry', 'failed', 'expired', 'invalid', 'stale')),
  error_code text,
  error text,
  unique (notification_id, attempt),
  check ((lease_token is null) = (leased_until is null)),
  check ((done_at is null) = (outcome is null)),
  check (done_at is null or lease_token is null)
);
create index if not exists queue_due on pgrelay.queue (due_at, id) where done_at is null;

create schema notifier;

-- Where a secret is kept, never the secret. The prefix keeps whoever may edit a profile from having
-- any variable of the processor's environment sent to a server of their choice.
create domain notifier.secret_ref as text check (
  value ~ '\A_env:NOTIFIER_[A-Z0-9_]+\Z'
  or value ~ '\A_secret:projects/[^/\s]+/secrets/[^/\s]+/versions/(latest|[0-9]+)\Z');

-- `transport`, `settings` and `timeout_seconds` are looked at when something is to be sent: what is
-- wrong with them is the verdict on an attempt, and not a transaction that fails.
create table notifier.profiles (
  name text primary key,
  transport text not null,
  settings jsonb not null default '{}',
  timeout_seconds numeric not null default 30,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  constraint secrets_are_references check (not jsonb_path_exists(settings,
    'strict $.** ? (@.type() == "object").keyvalue().key
     ? (@ like_regex "password|passwd|secret|token|api_?key" flag "i")'))
);

create table notifier.profile_secrets (
  profile text not null references notifier.profiles on delete cascade,
  key text not null,
  ref notifier.secret_ref not null,
  primary key (profile, key)
);

create table notifier.channels (
  name text primary key,
  profile text not null references notifier.profiles,
  enabled boolean not null default true,
  recipients text[] not null default '{}',
  max_retries integer not null default 3 check (max_retries between 0 and 20),
  expire_after interval check (expire_after > interval '0'),
  min_severity text check (min_severity in ('info', 'warning', 'error', 'critical')),
  group_wait interval not null default '30 seconds',
  group_interval interval not null default '5 minutes',
  repeat_interval interval not null default '4 hours',
  max_per_hour integer not null default 20 check (max_per_hour > 0),
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);

-- No foreign key: a notification for a channel that does not exist is kept, as invalid.
create table notifier.notifications (
  id bigint generated always as identity primary key,
  channel text not null,
  idempotency_key text,
  severity text not null check (severity in ('info', 'warning', 'error', 'critical')),
  kind text not null check (kind in ('message', 'firing', 'resolved', 'test')),
  subject text not null,
  body text not null,
  dedupe_key text,
  status text not null default 'queued'
    check (status in ('queued', 'retry', 'sent', 'failed', 'expired', 'invalid')),
  attempts integer not null default 0,
  error_code text,
  error text,
  partial jsonb, -- who was refused, of a notification that others accepted
  created_at timestamptz not null default now(),
  finished_at timestamptz,
  unique (channel, idempotency_key),
  constraint terminal_is_finished check ((status in ('queued', 'retry')) = (finished_at is null))
);
create index notifications_open on notifier.notifications (created_at) where finished_at is null;

-- The relay remembers ids from before the component was uninstalled: none of them comes again.
select setval(pg_get_serial_sequence('notifier.notifications', 'id'), max(notification_id))
from pgrelay.queue having max(notification_id) is not null;

-- Written and committed before anything is sent: whoever dies after that is charged for it.
create table notifier.attempts (
  notification_id bigint not null references notifier.notifications on delete cascade,
  attempt integer not null,
  processor text not null,
  started_at timestamptz not null default clock_timestamp(),
  finished_at timestamptz,
  verdict text check (verdict in ('sent', 'retry', 'failed', 'expired', 'invalid')),
  class text check (class in ('sent', 'transient', 'permanent')),
  ambiguous boolean not null default false, -- the server may have taken it
  error_code text,
  reply text,
  primary key (notification_id, attempt)
);

create table notifier.deliveries (
  notification_id bigint not null references notifier.notifications on delete cascade,
  recipient text not null,
  state text not null check (state in ('pending', 'accepted', 'refused')),
  code text not null default '',
  updated_at timestamptz not null default now(),
  primary key (notification_id, recipient)
);

-- Enough to send: commits and rolls back with its caller. Said twice under one key, it is one.
create function notifier.notify(
  channel text, subject text, body text,
  severity text default 'info', kind text default 'message',
  dedupe_key text default null, idempotency_key text default null,
  expire_after interval default null
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  made bigint;
  until timestamptz;
begin
  insert into notifier.notifications as n
    (channel, subject, body, severity, kind, dedupe_key, idempotency_key)
  values ($1, $2, $3, $4, $5, $6, $7)
  on conflict do nothing
  returning n.id into made;
  if made is null then
    return (select n.id from notifier.notifications n
            where n.channel = $1 and n.idempotency_key = $7);
  end if;
  until := now() + coalesce($8, (select c.expire_after from notifier.channels c where c.name = $1));
  insert into pgrelay.queue (notification_id, attempt, lane, expire_at)
  values (made, 1, $1, until);
  perform pg_notify('pgrelay_queue', '');
  return made;
end
$$;

-- Records a verdict and decides nothing. False: the attempt is not the next one of a notification
-- that is under way, or there is no such notification; nothing was changed.
create function notifier.set_status(
  id bigint, attempt integer, status text,
  code text default null, error text default null, partial jsonb default null
) returns boolean
language sql security definer set search_path = pg_catalog, pg_temp
as $$
  with recorded as (
    update notifier.notifications n
    set status = $3, error_code = $4, error = $5, partial = $6,
        attempts = case when $3 in ('expired', 'invalid') then n.attempts else $2 end,
        finished_at = case when $3 <> 'retry' then clock_timestamp() end
    where n.id = $1 and n.status in ('queued', 'retry') and n.attempts = $2 - 1
    returning n.id
  )
  select exists (select from recorded)
$$;

revoke all on function pgrelay.request_reload() from public;
revoke all on all functions in schema notifier from public;
