-- The merchant's own database: the event ledger and one snapshot table a resource.
--
-- Idempotent, as every file of this series: tables that exist keep their rows and get the columns
-- that they lack; row level security is switched on only for tables that are made here, because a
-- hosted database would otherwise publish them through its API.

do $$
declare
  resource text;
  has_lz4 boolean := exists (
    select from pg_settings where name = 'default_toast_compression' and 'lz4' = any (enumvals));
begin
  if to_regclass('shopify_events') is null then
    create table shopify_events (
      id bigint generated always as identity primary key,
      event_id text not null,
      organization_id text not null,
      shop_domain text not null,
      topic text not null,
      event_type text not null,
      resource_type text not null,
      resource_id text,
      payload jsonb,
      parsed_payload jsonb,
      received_at timestamptz not null,
      inserted_at timestamptz not null default now(),
      unique (organization_id, shop_domain, event_id)
    );
    alter table shopify_events enable row level security;
    if has_lz4 then
      alter table shopify_events alter column payload set compression lz4,
                                 alter column parsed_payload set compression lz4;
    end if;
  end if;

  foreach resource in array array[
    'shopify_orders', 'shopify_products', 'shopify_customers', 'shopify_inventory_items',
    'shopify_inventory_levels', 'shopify_locations', 'shopify_fulfillments', 'shopify_refunds',
    'shopify_order_transactions', 'shopify_draft_orders', 'shopify_checkouts',
    'shopify_collections']
  loop
    if to_regclass(resource) is null then
      execute format('create table %I (
          id bigint generated always as identity primary key,
          organization_id text not null,
          shop_domain text not null,
          shopify_id text not null,
          topic text not null,
          event_type text not null,
          payload jsonb,
          parsed_payload jsonb,
          is_deleted boolean not null default false,
          first_seen_at timestamptz not null default now(),
          last_seen_at timestamptz not null default now(),
          unique (organization_id, shop_domain, shopify_id)
        ) with (fillfactor = 50)', resource);
      execute format('alter table %I enable row level security', resource);
      if has_lz4 then
        execute format('alter table %I alter column payload set compression lz4,
                                       alter column parsed_payload set compression lz4', resource);
      end if;
    end if;
    execute format('alter table %I
        add column if not exists source_updated_at timestamptz,
        add column if not exists source_triggered_at timestamptz,
        add column if not exists event_id text', resource);
    execute format('create index if not exists %I on %I (organization_id, topic)',
                   resource || '_organization_topic', resource);
  end loop;
end
$$;

alter table shopify_events
  add column if not exists source_event_id text,
  add column if not exists api_version text,
  add column if not exists triggered_at timestamptz,
  add column if not exists source_updated_at timestamptz,
  add column if not exists payload_sha256 bytea,
  add column if not exists payload_raw bytea,
  add column if not exists trace_id text;

create index if not exists shopify_events_organization_topic
  on shopify_events (organization_id, topic, received_at);
create index if not exists shopify_events_organization_resource
  on shopify_events (organization_id, resource_type, resource_id);
