"""What Prometheus reads. One registry per server, so that nothing is left behind in the process."""

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from chitu_diffusion.serving.engine import Engine
from chitu_diffusion.serving.job import Job

WINDOW_S = 30.0  # of steps per second
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
STEP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50)


class Metrics:
    """Counts as jobs end and steps are done; the rest is looked up in the engine when it is asked for."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._queued = Gauge("chitu_queue_length", "Requests that wait.", registry=registry)
        self._running = Gauge("chitu_running", "Requests that ranks work on.", registry=registry)
        self._rate = Gauge(
            "chitu_steps_per_second", f"Denoising steps in the last {WINDOW_S:g} s, per second.", registry=registry
        )
        self._up = Gauge("chitu_rank_up", "Whether a rank can work.", ["rank"], registry=registry)
        self._steps = Counter("chitu_steps", "Denoising steps.", registry=registry)
        self._ended = Counter("chitu_requests", "Requests that ended.", ["outcome"], registry=registry)
        self._errors = Counter(
            "chitu_errors", "Requests that failed, were stopped, or were refused.", ["code"], registry=registry
        )
        self._backends = Counter("chitu_backend", "Requests by what carried attention.", ["backend"], registry=registry)
        self._latency = Histogram("chitu_request_seconds", "From accepted to done.", buckets=SECONDS, registry=registry)
        self._waited = Histogram("chitu_queue_seconds", "From accepted to begun.", buckets=SECONDS, registry=registry)
        self._step_time = Histogram(
            "chitu_step_seconds", "One denoising step.", buckets=STEP_SECONDS, registry=registry
        )
        self._recent: deque[float] = deque()

    def refused(self, code: str) -> None:
        """A request was not taken."""
        self._errors.labels(code).inc()

    def stepped(self) -> None:
        """A step is done."""
        self._steps.inc()
        self._recent.append(time.monotonic())
        self._forget()

    def ended(self, job: Job) -> None:
        """A request has its answer."""
        self._ended.labels(job.state).inc()
        if job.began:
            self._waited.observe(job.began - job.accepted)
        if job.failure is not None:
            self._errors.labels(job.failure.code).inc()
            return
        self._latency.observe(job.finished - job.accepted)
        assert job.result is not None, "it has not failed"
        for seconds in job.result.step_seconds:
            self._step_time.observe(seconds)
        if job.result.choice is not None:
            self._backends.labels(job.result.choice.used).inc()

    def text(self, engine: Engine) -> bytes:
        """Everything, in Prometheus's format."""
        self._forget()
        self._queued.set(len(engine.queue))
        self._running.set(len(engine.running))
        self._rate.set(len(self._recent) / WINDOW_S)
        for rank, state in enumerate(engine.ranks.states):
            self._up.labels(str(rank)).set(state == "ready")
        return generate_latest(self.registry)

    def _forget(self) -> None:
        while self._recent and time.monotonic() - self._recent[0] > WINDOW_S:
            self._recent.popleft()
