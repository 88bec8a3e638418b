-- Tables that the earlier system made: what our statements need of them, and no more.
--
-- Row level security stays as it is; see `provision_schema --enable-rls`. Idempotent.

do $$
declare
  tables constant text[] := array[
    'shopify_orders', 'shopify_products', 'shopify_customers', 'shopify_inventory_items',
    'shopify_inventory_levels', 'shopify_locations', 'shopify_fulfillments', 'shopify_refunds',
    'shopify_order_transactions', 'shopify_draft_orders', 'shopify_checkouts',
    'shopify_collections'];
  adopted record;
  item record;
begin
  alter table shopify_events
    add column if not exists payload jsonb,
    add column if not exists parsed_payload jsonb,
    add column if not exists inserted_at timestamptz not null default now();
  for adopted in select unnest(tables) as name loop
    execute format('alter table %I
        add column if not exists payload jsonb,
        add column if not exists parsed_payload jsonb,
        add column if not exists is_deleted boolean not null default false,
        add column if not exists first_seen_at timestamptz not null default now(),
        add column if not exists last_seen_at timestamptz not null default now()', adopted.name);
  end loop;

  for adopted in
    select name, name::regclass as oid,
           case name when 'shopify_events' then 'event_id' else 'shopify_id' end as last_key
    from unnest(tables || array['shopify_events']) as t (name)
  loop
    -- What is unknown or was erased is null, whatever the earlier system wrote there.
    for item in
      select attname as name from pg_attribute
      where attrelid = adopted.oid and attnotnull and not attisdropped
        and attname in ('resource_id', 'payload', 'parsed_payload')
    loop
      execute format('alter table %I alter column %I drop not null', adopted.name, item.name);
    end loop;

    -- Our ids and Shopify's topics may be longer than the earlier system's; no rewrite.
    for item in
      select attname as name from pg_attribute
      where attrelid = adopted.oid and not attisdropped
        and atttypid = 'varchar'::regtype and atttypmod between 0 and 254
        and attname in ('event_id', 'organization_id', 'shop_domain', 'topic', 'event_type',
                        'resource_type', 'resource_id', 'shopify_id')
    loop
      execute format('alter table %I alter column %I type text', adopted.name, item.name);
    end loop;

    -- Without this key no upsert finds its row. Its name and the order of its columns do not matter.
    if not exists (
      select from pg_index i
      where i.indrelid = adopted.oid and i.indisunique and i.indisvalid and i.indimmediate
        and i.indpred is null and i.indexprs is null and i.indnkeyatts = 3
        and (select array_agg(a.attname::text order by a.attname::text)
             from pg_attribute a
             where a.attrelid = i.indrelid and a.attnum = any (i.indkey[0:2]))
            = (select array_agg(c order by c)
               from unnest(array['organization_id', 'shop_domain', adopted.last_key]) c))
    then
      begin
        execute format('create unique index %I on %I (organization_id, shop_domain, %I)',
                       adopted.name || '_key', adopted.name, adopted.last_key);
      exception when unique_violation then
        raise exception using errcode = 'unique_violation', message = format(
          'table %s holds several rows with one organization_id, shop_domain and %s: keep one of '
          'each, then provision again', adopted.name, adopted.last_key);
      end;
    end if;
  end loop;

  -- The first migration goes by names: where the earlier system had the same index, one is enough.
  for item in
    select ours.indexrelid::regclass as index
    from pg_index ours
    join pg_index theirs on theirs.indrelid = ours.indrelid and theirs.indkey = ours.indkey
      and theirs.indexrelid < ours.indexrelid
      and theirs.indclass = ours.indclass and theirs.indoption = ours.indoption
      and theirs.indcollation = ours.indcollation
      and theirs.indpred is null and theirs.indexprs is null and theirs.indisvalid
    where ours.indexrelid in (
      select to_regclass(name || '_organization_topic') from unnest(tables) as t (name)
      union select to_regclass('shopify_events_organization_topic')
      union select to_regclass('shopify_events_organization_resource'))
  loop
    execute format('drop index %s', item.index);
  end loop;
end
$$;
