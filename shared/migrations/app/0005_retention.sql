-- Where retention stands in each tenant's event ledger, and the rows whose payloads are next to go.

create table subscriber_tenantretention (
  tenant text collate "C" primary key,
  after_id bigint not null,
  visited_at timestamptz not null
);

create index subscriber_failedevent_resolved
  on subscriber_subscriberfailedevent (resolved_at, id)
  where status = 'resolved' and redacted_at is null;
