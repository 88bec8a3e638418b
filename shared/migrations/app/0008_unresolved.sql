-- What an operator looks at and acts on, by its key: a long ledger is mostly resolved rows.
create index subscriber_failedevent_unresolved
  on subscriber_subscriberfailedevent (id) where status in ('pending', 'failed');
