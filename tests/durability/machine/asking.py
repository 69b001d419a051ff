"""Rules: searches and sessions, answered as the oracle does or refused as documented."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from hybridindex.types import SearchResult
from tests.durability.machine.base import NUMBERS, SEEDS, Base, counts, running
from tests.durability.machine.model import Key, Session
from tests.durability.machine.world import CONTENTS, NLIST, Answer

__all__ = ["Asking"]


class Asking(Base):
    def _check(
        self, found: SearchResult | Exception | Answer | None, content: str, n: int, seed: int, k: int, nprobe: int
    ) -> None:
        assert isinstance(found, SearchResult), found
        assert (found.nprobe_used == nprobe).all()
        self.lab.check(content, self.lab.queries(content, n, seed), k, nprobe, found.ids, found.distances)
        counts["exact answers"] += n

    @precondition(running)
    @rule(
        how=st.sampled_from(["client", "json"]),
        who=NUMBERS,
        n=st.integers(1, 20),
        seed=SEEDS,
        k=st.sampled_from([1, 5, 700]),
        nprobe=st.integers(1, NLIST),
    )
    def search(self, how: str, who: int, n: int, seed: int, k: int, nprobe: int) -> None:
        asked = self.lab.queries(self.served.content, n, seed)
        found = self.world.search(how, self.key(who), asked, k, nprobe)
        self._check(found, self.served.content, n, seed, k, nprobe)

    @precondition(running)
    @rule()
    def refused(self) -> None:
        """Bad requests get their documented status, and change nothing."""
        wrong = Key("wrong", "hix_wrong", "admin")
        dim = CONTENTS[self.served.content][1]
        for status, method, path, key, options in (
            (401, "GET", "/v1/status", None, {}),
            (401, "POST", "/v1/reload", wrong, {}),
            (404, "GET", "/v1/nothing", self.root, {}),
            (404, "GET", "/v1/sessions/nobody", self.root, {}),
            (400, "POST", "/v1/search", self.root, {"json": {"queries": [[0.0] * (dim + 1)]}}),
            (400, "POST", "/v1/search", self.root, {"json": {"queries": [[0.0] * dim], "nprobe": NLIST + 1}}),
            (415, "POST", "/v1/search", self.root, {"content": b"x", "headers": {"content-type": "text/plain"}}),
        ):
            answer = self.world.ask(method, path, key, **options)
            assert answer is not None
            assert answer.status == status, (path, answer)

    @precondition(running)
    @rule(who=NUMBERS)
    def open_session(self, who: int) -> None:
        answer = self.world.ask("POST", "/v1/sessions", self.key(who), json={"lookahead_bytes": 1 << 16})
        assert answer is not None
        assert answer.status in (200, 201), answer
        self.model.sessions.append(Session(answer.data["session"], self.key(who), self.served.content))
        self._refused_to_others(self.model.sessions[-1])

    def _refused_to_others(self, session: Session) -> None:
        for key in self.model.keys.values():
            if key.name != session.key.name:
                answer = self.world.ask("DELETE", f"/v1/sessions/{session.name}", key)
                assert answer is not None
                assert (answer.status, answer.kind) == (404, "unknown-session"), f"{key.name} closed another's session"

    @precondition(lambda self: self.model.sessions)
    @rule(which=NUMBERS, seed=SEEDS)
    def look_ahead(self, which: int, seed: int) -> None:
        session = self.model.sessions[which % len(self.model.sessions)]
        body = {"queries": self.lab.queries(session.content, 2, seed).tolist()}
        answer = self.world.ask("POST", f"/v1/sessions/{session.name}/lookahead", session.key, json=body)
        assert answer is not None
        assert answer.status == 202, answer

    @precondition(lambda self: self.model.sessions)
    @rule(which=NUMBERS, seed=SEEDS, nprobe=st.integers(1, NLIST))
    def search_in_session(self, which: int, seed: int, nprobe: int) -> None:
        """It answers from the generation in which it was opened."""
        session = self.model.sessions[which % len(self.model.sessions)]
        asked = self.lab.queries(session.content, 3, seed)
        found = self.world.search("json", session.key, asked, 5, nprobe, session.name)
        self._check(found, session.content, 3, seed, 5, nprobe)

    @precondition(lambda self: self.model.sessions)
    @rule(which=NUMBERS)
    def close_session(self, which: int) -> None:
        session = self.model.sessions[which % len(self.model.sessions)]
        self._refused_to_others(session)
        answer = self.world.ask("DELETE", f"/v1/sessions/{session.name}", session.key)
        assert answer is not None
        assert answer.status in (200, 204)
        self.model.sessions.remove(session)
