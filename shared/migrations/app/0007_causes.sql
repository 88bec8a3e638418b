-- What was given up, by its cause: whether an alert's is still there is asked every minute.
create index subscriber_failedevent_cause
  on subscriber_subscriberfailedevent (error_type, error_code) where status = 'failed';
