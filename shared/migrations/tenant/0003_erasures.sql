-- What was erased, so that no event from before brings it back: keyed hashes, nobody's name.
--
-- One row of each request also holds how far its erasure in this database has come. Idempotent.

do $$
begin
  if to_regclass('shopify_erasures') is null then
    create table shopify_erasures (
      subject_hash text collate "C" not null,
      event_id text not null,
      shop_domain text not null,
      subject_kind text not null,
      erased_at timestamptz not null,
      recorded_at timestamptz not null default now(),
      progress jsonb,
      primary key (subject_hash, event_id)
    );
    alter table shopify_erasures enable row level security;
  end if;
end
$$;
