"""The metrics and traces of one server: made, started and stopped together."""

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from serving.engine.fleet import Fleet
from serving.observability.metrics import Metrics
from serving.observability.tracing import Tracer
from serving.rpc.admission import Admission
from serving.settings import Settings

if TYPE_CHECKING:  # they bring prometheus_client, which a server without metrics does not need
    from prometheus_client import CollectorRegistry

    from serving.gallery.directory import GalleryDirectory
    from serving.observability.exposition import Endpoint
    from serving.observability.state import Watcher

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

TELLING_SECONDS = 1.0  # between two times that a worker writes how it stands


class Watch:
    """Costs nothing for what was not asked for."""

    def __init__(self, settings: Settings, *, worker: int = 0, folder: Path | None = None) -> None:
        """Make what the settings ask for; nothing runs yet.

        Args:
            settings: Those of the server.
            worker: The number of this process among its like.
            folder: Where it leaves its metrics for the process that serves them, that of a
                `Gathered`; None to serve them itself. Decides for every metric that the process
                makes from then on.

        Raises:
            BadSetting: if traces are asked for that cannot be sent.
        """
        self.worker = worker
        self.metrics = Metrics()
        """Takes note of calls and runs."""
        self.tracer = Tracer.of(settings.trace)
        """Takes note of calls with all their parts; None when nobody asked."""
        self.address = ""
        """Where the metrics are read, if here."""
        self._settings = settings
        self._folder = folder
        self._registry: CollectorRegistry | None = None
        self._endpoint: Endpoint | None = None
        self._stopping = threading.Event()
        self._telling: threading.Thread | None = None
        if settings.metrics_port is not None:
            import prometheus_client

            from serving.observability.counters import Counters, share_values

            share_values(folder, worker)
            self._registry = prometheus_client.CollectorRegistry()
            self.metrics = Counters(self._registry)

    def start(self, fleet: Fleet, admission: Admission, galleries: "GalleryDirectory") -> None:
        """Serve the metrics from now on, or tell them to the process that does.

        Args:
            fleet: The models.
            admission: What is in flight.
            galleries: Of which the open ones are told.

        Raises:
            Unavailable: if the address cannot be listened on.
        """
        if self._registry is None:
            return
        from serving.observability.exposition import serve
        from serving.observability.gauges import Gauges
        from serving.observability.state import Watcher

        watcher = Watcher(self.worker, fleet, admission, galleries, lambda: self.metrics.in_flight)
        if self._folder is None:
            self._registry.register(Gauges(lambda: [watcher.look()]))
            port = self._settings.metrics_port or 0
            self._endpoint = serve(self._registry, self._settings.metrics_host, port)
            self.address = self._endpoint.address
        else:
            self._telling = threading.Thread(
                target=self._tell, args=(watcher, self._folder), name="watch", daemon=True
            )
            self._telling.start()

    def stop(self, seconds: float) -> None:
        """Send the last traces, for so many seconds at most, and serve no metrics any more; blocks."""
        self._stopping.set()
        if self.tracer is not None:
            self.tracer.close(seconds)
        if self._telling is not None:
            self._telling.join()
        if self._endpoint is not None:
            self._endpoint.close()

    def _tell(self, watcher: "Watcher", folder: Path) -> None:
        from serving.observability.gathered import forget, tell

        while True:
            try:
                tell(folder, watcher.look())
            except OSError:  # a full disk is no reason to stop; the next time may do
                logger.warning("the metrics cannot be written to %s", folder, exc_info=True)
            if self._stopping.wait(TELLING_SECONDS):
                forget(folder, self.worker)
                return
