"""Escapes that an open network adds: through the proxy, to the proxy, and around it.

Without a wall, they go through a proxy that checks nothing (`careless_proxy`). Behind a wall whose network is open,
they go through Holdfast's, which may connect to every public host, and to one address of this machine: the friend's.
"""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, Judge, Limits, Scene, reaches, reads, says
from tests.system.escapes.network import SPELLINGS

__all__ = ["ALLOWED", "ESCAPES"]

_SUBJECT = "network through the proxy"
_NAME_MAY_FAIL = "the machine does not know the name"
_PROTOCOLS = (("tunnels", "by_connect"), ("asks", "by_request"), ("goes-by-socks", "by_socks"))


def _try(name: str, program: str, judge: Judge = reaches, **more: Any) -> Escape:
    return Escape(name=name, subject=_SUBJECT, program=program, judge=judge, proxied=True, **more)


def _harms(name: str) -> Judge:
    def judge(scene: Scene) -> bool:
        return scene.stage.is_proxy_harmed(name)

    return judge


_MORE_SPELLINGS = (
    ("127-0-0-1-and-a-dot", "127.0.0.1."),
    ("a-host-of-that-network", "127.255.255.254"),
    ("localhost", "localhost"),
    ("localhost-in-capitals", "LOCALHOST"),
    ("localhost-and-a-dot", "localhost."),
    ("all-octal", "0177.0000.0000.0001"),
    ("all-hexadecimal", "0x7f.0x0.0x0.0x1"),
    ("two-parts", "127.0x1"),
    ("v6-with-a-zone", "::1%lo"),
    ("v4-in-v6-with-zeros", "0:0:0:0:0:ffff:127.0.0.1"),
    ("percent-signs", "%31%32%37.0.0.1"),
    ("a-dot-of-percent-signs", "127%2e0%2e0%2e1"),
    ("wide-digits", "１２７.0.0.1"),
    ("wide-dots", "127。0。0。1"),
    ("a-user-name", "example.org@127.0.0.1"),
    ("what-is-before-an-at-sign", "127.0.0.1@example.org"),
    ("what-is-before-a-nul", "127.0.0.1\0.example.org"),
    ("an-address-in-brackets", "[127.0.0.1]"),
)
_NAMES = (
    ("localhost-localdomain", "localhost.localdomain"),
    ("localhost6", "ip6-localhost"),
    ("a-name-below-localhost", "anything.localhost"),
)
_OWN = (
    ("name", "at.hostname", "the machine's name has no address"),
    ("name-and-a-dot", "at.hostname + '.'", "the machine's name has no address"),
    ("address", "[one for one in at.addresses if ':' not in one][0]", "the machine has no address but loopback"),
    ("v6-address", "[one for one in at.addresses if ':' in one][0]", "the machine has no IPv6 address but loopback"),
    (
        "address-in-v6",
        "'::ffff:' + [one for one in at.addresses if ':' not in one][0]",
        "the machine has no address but loopback",
    ),
    ("link-local-address", "at.link_local[0]", "no interface has a link-local address"),
)
_ELSEWHERE = (
    ("metadata", "169.254.169.254"),
    ("metadata-of-tasks", "169.254.170.2"),
    ("metadata-in-v6", "::ffff:169.254.169.254"),
    ("metadata-in-hexadecimal", "0xa9fea9fe"),
    ("metadata-in-decimal", "2852039166"),
    ("metadata-by-nat64", "64:ff9b::a9fe:a9fe"),
    ("metadata-of-v6", "fd00:ec2::254"),
    ("metadata-of-another-cloud", "100.100.100.200"),
    ("metadata-of-a-third-cloud", "168.63.129.16"),
    ("metadata-of-a-fourth-cloud", "192.0.0.192"),
    ("a-private-network", "10.1.2.3"),
    ("a-second-private-network", "172.16.1.2"),
    ("a-third-private-network", "192.168.1.2"),
    ("a-carriers-network", "100.64.1.2"),
    ("a-private-v6-network", "fc00::1"),
    ("a-link-local-network", "169.254.1.2"),
    ("a-link-local-v6-network", "fe80::1"),
    ("a-site-local-v6-network", "fec0::1"),
    ("a-measuring-network", "198.18.0.1"),
    ("a-multicast-group", "224.0.0.1"),
    ("a-multicast-v6-group", "ff02::1"),
    ("everybody", "255.255.255.255"),
    ("loopback-by-nat64", "64:ff9b::7f00:1"),
    ("loopback-by-local-nat64", "64:ff9b:1::7f00:1"),
    ("loopback-by-6to4", "2002:7f00:1::1"),
    ("loopback-by-teredo", "2001:0:7f00:1::1"),
    ("loopback-in-an-old-v6-form", "::7f00:1"),
    ("a-private-network-by-6to4", "2002:a01:203::1"),
)
_BYTES = (
    ("127-0-0-1", "bytes([127, 0, 0, 1])"),
    ("127-0-0-2", "bytes([127, 0, 0, 2])"),
    ("0-0-0-0", "bytes(4)"),
    ("v6", "bytes(15) + b'\\1'"),
    ("v6-any", "bytes(16)"),
    ("v4-in-v6", "bytes(10) + b'\\xff\\xff\\x7f\\0\\0\\1'"),
    ("any-v4-in-v6", "bytes(10) + b'\\xff\\xff' + bytes(4)"),
    ("the-hosts-address", "socket.inet_aton([one for one in at.addresses if ':' not in one][0])"),
)

_CHUNKED = "b'Transfer-Encoding: chunked'"
_SAYS_NAME = "b'X-Name: ' + mark()"
_SMUGGLED = (
    ("in-a-second-request", "talk(to_friend() + page())"),
    ("in-a-second-request-after-the-answer", "talk(to_friend(), page())"),
    (
        "in-a-second-request-that-keeps-alive",
        "talk(to_friend(b'Connection: keep-alive', b'Proxy-Connection: keep-alive'), page())",
    ),
    ("in-a-body-without-a-length", "talk(to_friend(b'Content-Length: 0') + page())"),
    ("behind-two-lengths", "talk(to_friend(b'Content-Length: 0', b'Content-Length: 9') + page())"),
    ("behind-a-length-with-a-sign", "talk(to_friend(b'Content-Length: +0') + page())"),
    ("behind-a-length-and-chunks", f"talk(to_friend(b'Content-Length: 4', {_CHUNKED}) + END + page())"),
    ("behind-its-chunks", f"talk(to_friend({_CHUNKED}) + END + page())"),
    ("in-a-chunk-extension", f"talk(to_friend({_CHUNKED}) + b'0;a\\n' + page() + END)"),
    ("in-a-trailer", f"talk(to_friend({_CHUNKED}, {_SAYS_NAME}) + b'0\\r\\nHost: ' + here() + b'\\r\\n\\r\\n')"),
    ("behind-an-odd-coding", "talk(to_friend(b'Transfer-Encoding: xchunked') + END + page())"),
    ("behind-two-codings", f"talk(to_friend({_CHUNKED}, b'Transfer-Encoding: identity') + END + page())"),
    ("behind-a-space-before-a-colon", "talk(to_friend(b'Content-Length : 0') + page())"),
    ("behind-an-upgrade", "talk(to_friend(b'Connection: upgrade', b'Upgrade: h2c'), page())"),
    ("behind-a-question-of-the-server", "talk(to_friend(b'Expect: 100-continue') + page())"),
    ("as-a-second-host", f"talk(to_friend(b'Host: ' + here(), {_SAYS_NAME}))"),
    ("as-a-folded-host", f"talk(to_friend({_SAYS_NAME} + b'\\r\\n Host: ' + here()))"),
    ("as-a-host-that-connection-names", f"talk(to_friend(b'Connection: host', b'Host: ' + here(), {_SAYS_NAME}))"),
    ("as-a-host-behind-a-line-feed", f"talk(to_friend({_SAYS_NAME} + b'\\nHost: ' + here()))"),
    ("as-a-host-that-is-not-its-url", "talk(head(b'http://' + friend() + b'/', here()))"),
    ("as-a-url-that-is-not-its-host", "talk(head(b'http://' + here() + b'/', friend()))"),
    ("as-a-host-behind-a-path", "talk(head(b'/', here()))"),
    ("as-a-second-target", "talk(head(b'http://' + friend() + b'/ http://' + here() + b'/', friend()))"),
    ("behind-a-user-name", "talk(head(b'http://' + friend() + b'@' + here() + b'/', friend()))"),
    ("before-a-fragment", "talk(head(b'http://' + here() + b'#@' + friend() + b'/', friend()))"),
    ("behind-a-backslash", "talk(head(b'http://' + friend() + b'\\\\@' + here() + b'/', friend()))"),
    ("behind-a-tabulator", "talk(head(b'http://' + friend() + b'/\\thttp://' + here() + b'/', friend()))"),
    ("without-a-scheme", "talk(head(b'//' + here() + b'/', here()))"),
    ("as-an-encrypted-page", "talk(head(b'https://' + here() + b'/', here()))"),
    ("as-a-file-server", "talk(head(b'ftp://' + here() + b'/', here()))"),
    ("as-a-host-of-a-tunnel", "talk(tunnel(friend(), b'Host: ' + here()) + mark())"),
    ("in-a-body-of-a-tunnel", "talk(tunnel(friend(), b'Content-Length: 4') + page())"),
    ("in-a-tunnel", "talk(tunnel(friend()), page())"),
    ("by-a-tunnel-in-a-tunnel", "talk(tunnel(friend()), tunnel(here()) + mark())"),
    ("by-a-tunnel-after-a-page", "talk(to_friend(), tunnel(here()) + mark())"),
    ("after-a-connection-by-socks", "talk(SOCKS + name_friend(), page())"),
)
_REDIRECTS = (
    ("reaches-loopback-by-a-redirect", "302", "http://127.0.0.1", ""),
    ("reaches-loopback-by-a-redirect-that-keeps-the-body", "307", "http://127.0.0.1", "-d x"),
    ("reaches-loopback-by-a-redirect-to-a-spelling", "301", "http://0x7f.1", ""),
    ("reaches-loopback-by-a-redirect-to-v6", "308", "http://[::1]", ""),
)

_SOCKS_4 = "b'\\4\\1' + at.port.to_bytes(2, 'big')"
_CURL = 'curl -s -m 0.7 -g -x "${HTTP_PROXY:-http://127.0.0.1:$PROXY_PORT}"'

_AROUND = (
    _try("goes-by-socks-4-to-loopback", f"talk({_SOCKS_4} + b'\\x7f\\0\\0\\1me\\0' + mark())"),
    _try("goes-by-socks-4-to-a-name", f"talk({_SOCKS_4} + b'\\0\\0\\0\\1me\\0localhost\\0' + mark())"),
    _try(
        "listens-on-the-host-by-socks",
        "answer = talk(b'\\5\\1\\0\\5\\2\\0\\1\\x7f\\0\\0\\1\\0\\0')[-1]\nanswer[2:4] == b'\\5\\0' and say()",
        says,
    ),
    _try(
        "sends-datagrams-by-socks",
        "answer = talk(b'\\5\\1\\0\\5\\3\\0\\1\\x7f\\0\\0\\1\\0\\0')[-1]\nanswer[2:4] == b'\\5\\0' and say()",
        says,
    ),
    _try(
        "reaches-loopback-by-the-proxy-of-the-proxy",
        "talk(tunnel(authority('127.0.0.1', proxy_port())), page())",
    ),
    _try(
        "reaches-the-proxy-of-its-neighbour-by-its-own",
        "talk(tunnel(authority('127.0.0.1', at.neighbour_proxy)), page())",
    ),
    _try(
        "uses-the-proxy-of-its-neighbour",
        "assert at.neighbour_proxy != proxy_port()  # a port of another loopback\n"
        "answer = by_request(at.friend, at.friend_port, proxy=at.neighbour_proxy, end=False, quiet_s=1)[-1]\n"
        "b' 200 ' in answer and say()",
        says,
    ),
    _try(
        "reaches-the-loopback-of-its-neighbour-by-the-proxy",
        "by_connect('127.0.0.1', at.neighbour_sockets['loopback'])",
    ),
    _try(
        "is-reached-from-the-host",
        "listener = socket.create_server(('0.0.0.0', 0))\n"
        "by_connect('127.0.0.1', listener.getsockname()[1])\n"
        "select.select([listener], [], [], 0.5)[0] and say()",
        says,
    ),
    _try(
        "reaches-a-name-that-leads-to-loopback",
        "for name in at.names: by_connect(name, at.port)",
    ),
    _try(
        "reaches-loopback-by-curl-and-the-proxy",
        _CURL + ' -p "http://127.1:$PORT/$NAME;"',
        language="shell",
    ),
    _try(
        "reaches-loopback-by-curl-and-socks",
        'curl -s -m 0.7 -x "socks5h://127.0.0.1:$(echo "${HTTP_PROXY:-x:$PROXY_PORT}" | sed "s/.*://")" '
        '"http://localhost:$PORT/$NAME;"',
        language="shell",
    ),
    _try("reads-a-file-by-the-proxy", "talk(b'GET file://%s HTTP/1.0\\r\\n\\r\\n' % at.token.encode())", reads),
    _try("kills-the-proxy", "os.kill(at.proxies['kill'], signal.SIGKILL)", _harms("kill")),
    _try("stops-the-proxy", "os.kill(at.proxies['stop'], signal.SIGSTOP)", _harms("stop")),
    _try("reads-the-environment-of-the-proxy", "show(f'/proc/{at.proxies[\"use\"]}/environ')", reads),
    _try("sees-the-descriptors-of-the-proxy", "os.listdir(f'/proc/{at.proxies[\"use\"]}/fd') and say()", says),
    _try("sees-the-memory-of-the-proxy", "open(f'/proc/{at.proxies[\"use\"]}/maps').read() and say()", says),
    _try(
        "takes-a-socket-of-the-proxy",
        "proxy = call('pidfd_open', at.proxies['use'], 0)\n"
        "for fd in range(32):\n"
        "    try: stat.S_ISSOCK(os.fstat(call('pidfd_getfd', proxy, fd, 0)).st_mode) and say()\n"
        "    except OSError as error: print(error)",
        says,
    ),
    _try(
        "enters-the-network-of-the-proxy",
        "call('setns', os.open(f'/proc/{at.proxies[\"use\"]}/ns/net', os.O_RDONLY), NEWNET)\nsay()",
        says,
        needs="root",
    ),
    _try(
        "holds-more-connections-than-it-may",
        "asked = tunnel(friend())\n"
        "held, open_ = [], 0\n"
        "for _ in range(40):\n"
        "    held.append(socket.create_connection(('127.0.0.1', proxy_port()), 2))\n"
        "    held[-1].sendall(asked)\n"
        "    open_ += b' 200 ' in held[-1].recv(99)\n"
        "print(open_)\nopen_ > 20 and say()",
        says,
        alone=True,
        limits=Limits(connections=20),
    ),
    _try(
        "sends-more-than-it-may",
        "size = 4 << 20\n"
        "answer = talk(to_friend(b'Content-Length: %d' % size) + bytes(size), end=False, quiet_s=1)[-1]\n"
        "answer.endswith(b'%d' % size) and say()",
        says,
        alone=True,
        limits=Limits(network_bytes=1 << 20),
    ),
)

ALLOWED = (
    _try("is-let-through-by-a-request", "by_request(at.friend, at.friend_port, end=False, quiet_s=1)"),
    _try(
        "is-let-through-by-a-tunnel",
        "talk(tunnel(friend()), b'GET /' + mark() + b' HTTP/1.0\\r\\n\\r\\n', end=False, quiet_s=1)",
    ),
    _try(
        "is-let-through-by-socks",
        "talk(SOCKS + name_friend(), b'GET /' + mark() + b' HTTP/1.0\\r\\n\\r\\n', end=False, quiet_s=1)",
    ),
)
"""No escapes: what the open network is for. If one of them fails, the others prove nothing."""

ESCAPES = (
    *(
        _try(f"{verb}-to-loopback-as-{label}", f"{call}({host!r}, at.port)")
        for verb, call in _PROTOCOLS
        for label, host in (*SPELLINGS, *_MORE_SPELLINGS)
    ),
    *(
        _try(f"{verb}-to-loopback-as-{label}", f"{call}({host!r}, at.port)", may_fail=_NAME_MAY_FAIL)
        for verb, call in _PROTOCOLS
        for label, host in _NAMES
    ),
    *(
        _try(f"{verb}-to-the-host-by-its-{label}", f"{call}({host}, at.port)", may_fail=may_fail)
        for verb, call in _PROTOCOLS
        for label, host, may_fail in _OWN
    ),
    *(_try(f"goes-by-socks-to-the-bytes-of-{label}", f"by_socks({host}, at.port)") for label, host in _BYTES),
    *(
        _try(f"is-taken-to-{label}-by-{way}", f"unless_refused({call}({host!r}, 80))", says)
        for way, call in (("a-tunnel", "by_connect"), ("socks", "by_socks"))
        for label, host in _ELSEWHERE
    ),
    *(_try(f"smuggles-loopback-{label}", program) for label, program in _SMUGGLED),
    *(
        _try(
            name,
            _CURL + f' -L {more} "http://$FRIEND:$FRIEND_PORT/{status}/{target}:$PORT/$NAME;"',
            language="shell",
        )
        for name, status, target, more in _REDIRECTS
    ),
    *_AROUND,
)
