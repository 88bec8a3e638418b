"""decode, route, parse, store: what is done with an event, at the first try and at each replay."""

from typing import Final

import psycopg

from shared import db, lifecycle, log, store
from shared import envelope as envelopes
from shared.directory import Directory, Route, asked
from shared.errors import MissingAttributeError
from shared.model import Envelope, Event, LedgerOutcome, Outcome
from shared.parse import check_shop, parse
from shared.privacy import Privacy, Recorded
from shared.subjects import COMPLIANCE

_OUT_OF_REACH: Final = (
    "The application database could not be reached. The event is stored again later."
)
_UNINSTALLED: Final = "app/uninstalled"


class Pipeline:
    """Takes envelopes to the tenant databases that they belong to."""

    def __init__(
        self,
        directory: Directory,
        tenants: db.Tenants,
        application: db.Pool,
        privacy: Privacy,
    ) -> None:
        self._directory = directory
        self._tenants = tenants
        self._application = application
        self._privacy = privacy

    def apply(self, envelope: Envelope, *, dry_run: bool = False) -> Outcome:
        """Stores the event, or raises why not. Safe to repeat, late, and beside itself."""
        envelope = envelopes.opened(envelope)
        _check_attributes(envelope)
        recorded = None if dry_run else self._recorded(envelope)
        route = self._directory.route(envelope.shop_domain)
        event = parse(envelope)
        check_shop(envelope)
        pool = self._tenants.pool(route.target)
        marks = self._privacy.marks(envelope.shop_domain, event)
        try:
            outcome = store.store(
                pool, route.organization_id, envelope, event, marks, dry_run=dry_run
            )
            if recorded:
                self._privacy.suppress(pool, recorded)
        except psycopg.OperationalError as error:
            if db.code(error).startswith(db.AUTHENTICATION_CLASS):
                self._directory.doubt(envelope.shop_domain)
            raise
        if not dry_run:
            self._follow(route, envelope, event, outcome)
        return outcome

    def probe(self, organization_id: str) -> None:
        """Asks the organization's tenant database for nothing; raises why it does not answer."""
        pool = self._tenants.pool(self._directory.target(organization_id))
        pool.run(lambda connection: connection.execute("select 1"))

    def organization(self, shop_domain: str) -> str | None:
        """The shop's organization, as far as it is known without asking."""
        return self._directory.organization(shop_domain)

    def _recorded(self, envelope: Envelope) -> Recorded | None:
        """A compliance request is on record before its event is stored: the database where that
        would be may be gone for good."""
        if envelope.topic not in COMPLIANCE:
            return None
        check_shop(envelope)
        event = parse(envelope)
        return asked(lambda: self._privacy.record(envelope, event), _OUT_OF_REACH)

    def _follow(self, route: Route, envelope: Envelope, event: Event, outcome: Outcome) -> None:
        """What else a stored event leads to. Whoever fails here is replayed, and comes again."""
        if outcome.ledger is LedgerOutcome.SUPPRESSED:
            asked(lambda: self._privacy.forget(envelope), _OUT_OF_REACH)
        elif event.topic == _UNINSTALLED:
            asked(lambda: self._uninstalled(route, envelope, event), _OUT_OF_REACH)

    def _uninstalled(self, route: Route, envelope: Envelope, event: Event) -> None:
        shop, organization = envelope.shop_domain, route.organization_id
        if lifecycle.uninstalled(self._application, shop, organization, event.source_updated_at):
            log.warning("shop.uninstalled", shop_domain=shop, organization_id=organization)


def _check_attributes(envelope: Envelope) -> None:
    if not envelopes.is_shop_domain(envelope.shop_domain):
        raise MissingAttributeError(
            "X-Shopify-Shop-Domain is missing or no *.myshopify.com name. Correct the publisher."
        )
    if not envelope.topic:
        raise MissingAttributeError("X-Shopify-Topic is missing. Correct the publisher.")
