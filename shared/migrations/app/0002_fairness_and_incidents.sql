-- Turns between tenants, tenants that are down or paused, and who did what by hand.

-- One row: where the turn stopped, and when the retry function last ran.
create table subscriber_retrystate (
  id boolean primary key default true check (id),
  last_tenant text collate "C" not null default '',
  last_run_started_at timestamptz,
  last_run_finished_at timestamptz,
  last_maintenance_at timestamptz,
  heartbeat_at timestamptz
);
insert into subscriber_retrystate default values;

create table subscriber_operatoraction (
  id bigint generated always as identity primary key,
  acted_at timestamptz not null default now(),
  actor text not null,
  action text not null,
  reason text not null,
  scope jsonb not null,
  count integer not null
);

create table subscriber_tenantincident (
  id bigint generated always as identity primary key,
  tenant text collate "C" not null,
  kind text not null check (kind in ('unavailable', 'paused')),
  started_at timestamptz not null,
  last_probe_at timestamptz,
  next_probe_at timestamptz not null,
  probe_count integer not null default 0,
  ended_at timestamptz,
  cause text not null,
  opened_alerted_at timestamptz,
  closed_alerted_at timestamptz,
  constraint a_pause_is_never_probed
    check (kind <> 'paused' or ended_at is not null or next_probe_at = 'infinity')
);
create unique index subscriber_tenantincident_open
  on subscriber_tenantincident (tenant) where ended_at is null;

-- A claim walks from tenant to tenant and takes each one's longest due row.
drop index subscriber_failedevent_due;
create index subscriber_failedevent_due
  on subscriber_subscriberfailedevent (tenant, due_at, id)
  where status = 'pending' and lease_token is null;
create index subscriber_failedevent_failed
  on subscriber_subscriberfailedevent (tenant, last_attempted_at) where status = 'failed';
