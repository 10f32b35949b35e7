"""Signed tokens name a principal; what is forged, too old, for others or signed in another way gets nothing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from holdfast import Host, Settings
from holdfast.errors import ConfigurationError
from holdfast.server import bind, serve_until
from tests.server.live import Live, served

SECRET = "a secret of a good many characters, not to be guessed"
OTHER = "another secret of a good many characters, not to be guessed"


def key_pair() -> tuple[str, str]:
    """A private and a public key in PEM."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    text = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return text.decode(), public.decode()


PRIVATE, PUBLIC = key_pair()
EXPECTED = {"aud": "us", "iss": "our provider"}
"""The claims that a particular server expects."""
STRICT = {"jwt_audience": "us", "jwt_issuer": "our provider"}


def claims(**changed: Any) -> dict[str, Any]:
    """The claims of a good token, with some changed; None leaves one out."""
    made = {"sub": "alice", "exp": time.time() + 600, **EXPECTED, **changed}
    return {name: value for name, value in made.items() if value is not None}


def signed(key: str = SECRET, algorithm: str = "HS256", **changed: Any) -> str:
    return jwt.encode(claims(**changed), key, algorithm=algorithm)


def forged(header: dict[str, Any], secret: str) -> str:
    """A token put together by hand, as no library would: signed by HMAC with whatever is given."""

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

    text = f"{part(json.dumps(header).encode())}.{part(json.dumps(claims()).encode())}"
    return f"{text}.{part(hmac.digest(secret.encode(), text.encode(), hashlib.sha256)) if secret else ''}"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def status(server: Live, token: str) -> tuple[int, str]:
    answer = await server.http.get("/v1/sessions", headers=bearer(token))
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]


def test_a_token_is_its_subject_with_the_role_of_a_user() -> None:
    async def scenario(server: Live) -> None:
        await server.http.post("/v1/sessions/s/messages?wait=60", json={"content": "hi"}, headers=bearer(signed()))
        assert await server.host.session("s", principal="alice").transcript()
        assert (await server.http.get("/v1/keys", headers=bearer(signed()))).status_code == 403
        foreign = {**bearer(signed()), "x-holdfast-user": "bob"}
        assert (await server.http.get("/v1/sessions", headers=foreign)).status_code == 403
        assert (await server.http.get("/v1/sessions")).status_code == 401, "with tokens, loopback is not enough"
        assert (await server.http.get("/v1/sessions", headers=bearer("hf_nonsense"))).status_code == 401

    served(scenario, jwt_secret=SECRET, **STRICT)


def test_a_role_comes_from_a_claim_of_our_own() -> None:
    async def scenario(server: Live) -> None:
        admin = bearer(signed(holdfast_role="admin"))
        assert (await server.http.get("/v1/keys", headers=admin)).status_code == 200
        assert (await server.http.get("/v1/keys", headers=bearer(signed(role="admin")))).status_code == 403
        trusted = {**bearer(signed(holdfast_role="trusted")), "x-holdfast-user": "bob"}
        assert (await server.http.get("/v1/sessions", headers=trusted)).status_code == 200
        assert (await status(server, signed(holdfast_role="king")))[0] == 401

    served(scenario, jwt_secret=SECRET, **STRICT)


@pytest.mark.parametrize(
    "token",
    [
        pytest.param(lambda: signed(key=OTHER), id="another key"),
        pytest.param(lambda: signed(exp=time.time() - 60), id="expired"),
        pytest.param(lambda: signed(exp=None), id="no end"),
        pytest.param(lambda: signed(sub=None), id="no owner"),
        pytest.param(lambda: signed(sub=""), id="an empty owner"),
        pytest.param(lambda: signed(sub="a\nb"), id="an unprintable owner"),
        pytest.param(lambda: jwt.encode({**claims(), "sub": 7}, SECRET), id="a number as owner"),
        pytest.param(lambda: signed(nbf=time.time() + 600), id="not yet"),
        pytest.param(lambda: signed(aud="others"), id="another audience"),
        pytest.param(lambda: signed(aud=None), id="no audience"),
        pytest.param(lambda: signed(iss="others"), id="another issuer"),
        pytest.param(lambda: signed(iss=None), id="no issuer"),
        pytest.param(lambda: forged({"alg": "none", "typ": "JWT"}, ""), id="alg none"),
        pytest.param(lambda: forged({"alg": "None", "typ": "JWT"}, SECRET), id="alg None"),
        pytest.param(lambda: forged({"alg": ["HS256"]}, SECRET), id="a list as alg"),
        pytest.param(lambda: forged({"alg": "HS256"}, PUBLIC), id="the public key as a secret"),
        pytest.param(lambda: signed(SECRET + OTHER, "HS512"), id="another algorithm"),
        pytest.param(lambda: forged({"alg": "HS256", "crit": ["x"], "x": 1}, SECRET), id="a critical extension"),
        pytest.param(lambda: signed(exp=float("inf")), id="an endless one"),
        pytest.param(lambda: signed(exp=1.7e308), id="one that ends later than any clock"),
        pytest.param(lambda: signed(exp=[1]), id="a list as its end"),
        pytest.param(lambda: "ey" + "W1tb" * 10_000 + ".ey.ey", id="a deep one"),
        pytest.param(lambda: signed()[:-4] + "AAAA", id="another signature"),
        pytest.param(lambda: "ey.ey.ey", id="nonsense"),
    ],
)
def test_a_token_that_is_not_good_gets_nothing(token: Any) -> None:
    async def scenario(server: Live) -> None:
        made = token()
        found, message = await status(server, made)
        assert found == 401, message
        assert message and SECRET not in message and made not in message

    served(scenario, jwt_secret=SECRET, jwt_public_key=PUBLIC, **STRICT)


def test_the_expected_audience_and_issuer_let_a_token_in() -> None:
    async def scenario(server: Live) -> None:
        assert (await status(server, signed(aud=["others", "us"])))[0] == 200
        assert (await status(server, signed(PRIVATE, "RS256")))[0] == 200

    served(scenario, jwt_secret=SECRET, jwt_public_key=PUBLIC, **STRICT)


def test_where_no_audience_is_expected_a_token_for_a_particular_one_is_refused() -> None:
    async def scenario(server: Live) -> None:
        assert (await status(server, signed(aud=None, iss="anybody")))[0] == 200
        assert (await status(server, signed(aud="others")))[0] == 401

    served(scenario, jwt_secret=SECRET)


def test_keys_and_tokens_stand_side_by_side() -> None:
    async def scenario(server: Live) -> None:
        _, secret = await server.app.keys.create(principal="bob", role="user")
        assert (await status(server, secret))[0] == 200
        assert (await status(server, signed(PRIVATE, "RS256")))[0] == 200
        assert (await status(server, signed()))[0] == 401, "there is no secret here"

    served(scenario, jwt_public_key=PUBLIC, **STRICT)


def test_the_public_key_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.write_text(PUBLIC)

    async def scenario(server: Live) -> None:
        assert (await status(server, signed(PRIVATE, "RS256")))[0] == 200

    served(scenario, jwt_public_key=str(file), **STRICT)


@pytest.mark.parametrize(
    "wrong",
    [{"jwt_public_key": "/nowhere/key.pem"}, {"jwt_public_key": "-----BEGIN x"}, {"jwt_secret": PUBLIC}],
    ids=["no file", "no key", "a public key as a secret"],
)
def test_a_key_that_is_none_is_said_before_the_server_starts(wrong: dict[str, str]) -> None:
    settings = Settings(port=0, store="memory://", **wrong)  # type: ignore[arg-type]

    async def main() -> None:
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        host = Host(lambda run: "x", settings=settings)
        with pytest.raises(ConfigurationError, match="jwt_"):
            await serve_until(asked, host, bind(settings), ready=lambda running: None, note=lambda text: None)

    asyncio.run(main())


def test_a_secret_that_can_be_guessed_is_refused_and_never_shown() -> None:
    with pytest.raises(ConfigurationError, match="is too short") as refused:
        Settings(jwt_secret="hunter2")
    assert "hunter2" not in str(refused.value)
