-- Requests of the compliance topics, and what was removed where because of them.

create table privacy_request (
  id bigint generated always as identity primary key,
  kind text not null
    check (kind in ('customers/data_request', 'customers/redact', 'shop/redact')),
  shop_domain text not null,
  organization_id text,
  event_id text not null,
  -- Whose data, as the request names them; taken away once they are erased.
  customer_id text,
  email text,
  orders jsonb not null default '[]',
  -- Keyed: tells of a known customer whether this request was theirs.
  subject_hash text collate "C",
  requested_at timestamptz not null,
  recorded_at timestamptz not null default now(),
  due_at timestamptz not null,
  attempted_at timestamptz,
  alerted_at timestamptz,
  overdue_logged_at timestamptz,
  exported_at timestamptz,
  done_at timestamptz,
  unique (shop_domain, event_id)
);
create index privacy_request_open on privacy_request (due_at, id) where done_at is null;

-- One row a request and database: what is left to do there, and then the count of what was removed.
create table privacy_receipt (
  id bigint generated always as identity primary key,
  request_id bigint not null references privacy_request (id) on delete cascade,
  database text not null check (database in ('application', 'tenant')),
  organization_id text not null default '',
  state text not null default 'open' check (state in ('open', 'done', 'gone')),
  reason text,
  progress jsonb,
  counts jsonb not null default '{}',
  started_at timestamptz not null default now(),
  finished_at timestamptz,
  unique (request_id, database, organization_id),
  constraint finished_has_time check ((state = 'open') = (finished_at is null))
);
