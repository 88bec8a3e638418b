-- The audit rows whose message Pub/Sub may not have: republished in the order of their arrival.

alter table shopify_shopifyevent add constraint outbox_is_whole
  check (needs_publish = (outbox_envelope is not null)
         and needs_publish = (outbox_body is not null));
create index shopify_shopifyevent_outbox
  on shopify_shopifyevent (received_at, id) where needs_publish;
