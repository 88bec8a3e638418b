-- The authority that a tenant database's certificate is checked against (sslmode verify-ca or
-- verify-full), in PEM. No secret. Null: none, or the system's.
alter table databases_databasecredential add column sslrootcert text;
