"""decode, route, parse, store: what is done with an event, at the first try and at each replay."""

import psycopg

from shared import db, store
from shared import envelope as envelopes
from shared.directory import Directory
from shared.errors import MissingAttributeError
from shared.model import Envelope, Outcome
from shared.parse import check_shop, parse


class Pipeline:
    """Takes envelopes to the tenant databases that they belong to."""

    def __init__(self, directory: Directory, tenants: db.Tenants) -> None:
        self._directory = directory
        self._tenants = tenants

    def apply(self, envelope: Envelope, *, dry_run: bool = False) -> Outcome:
        """Stores the event, or raises why not. Safe to repeat, late, and beside itself."""
        envelope = envelopes.opened(envelope)
        _check_attributes(envelope)
        route = self._directory.route(envelope.shop_domain)
        event = parse(envelope)
        check_shop(envelope)
        pool = self._tenants.pool(route.target)
        try:
            return store.store(pool, route.organization_id, envelope, event, dry_run=dry_run)
        except psycopg.OperationalError as error:
            if db.code(error).startswith(db.AUTHENTICATION_CLASS):
                self._directory.doubt(envelope.shop_domain)
            raise

    def probe(self, organization_id: str) -> None:
        """Asks the organization's tenant database for nothing; raises why it does not answer."""
        pool = self._tenants.pool(self._directory.target(organization_id))
        pool.run(lambda connection: connection.execute("select 1"))

    def organization(self, shop_domain: str) -> str | None:
        """The shop's organization, as far as it is known without asking."""
        return self._directory.organization(shop_domain)


def _check_attributes(envelope: Envelope) -> None:
    if not envelopes.is_shop_domain(envelope.shop_domain):
        raise MissingAttributeError(
            "X-Shopify-Shop-Domain is missing or no *.myshopify.com name. Correct the publisher."
        )
    if not envelope.topic:
        raise MissingAttributeError("X-Shopify-Topic is missing. Correct the publisher.")
