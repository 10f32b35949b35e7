"""Tools that work with web pages in a real browser: open, read, click, type, look. Needs the extra ``browser``.

Invariants
- A session has one browser at most. It is a piece of background work of the session's activation: an interrupt leaves
  it alone, a stop of the session ends it with all its processes, and so does a while without use.
- Its only way to the network is a `Gate` of its own, so private addresses are refused in whatever way a page asks.
- Actions of one browser happen one after the other, each within its deadline. One that is interrupted stops the page
  from loading on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.agents.run import Call
from holdfast.agents.tool import Home, Tool, Toolset, tool
from holdfast.errors import MissingExtra, ToolFailed
from holdfast.runtime import check_interrupt, current_scope
from holdfast.tools.environment import clean_environment
from holdfast.tools.web_addresses import AddressRules
from holdfast.tools.web_gate import Gate
from holdfast.tools.web_text import html_text
from holdfast.tools.workspace import Workspace

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Locator, Page, Playwright

__all__ = ["Browser", "find_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
_LAUNCH_S = 30.0
_SETTLE_S = 2.0
_MARGIN_S = 15.0
_PAGES = 5
_REF = re.compile(r"(?:f\d{1,4})?e\d{1,7}")
_ARGUMENTS = (
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--dns-prefetch-disable",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--no-pings",
)
"""Nothing goes around the proxy, and nothing is fetched that no page asked for."""


def find_chromium() -> str | None:
    """The Chromium to use: that of the environment variable ``HOLDFAST_CHROMIUM``, or the first one in PATH."""
    named = os.environ.get("HOLDFAST_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser(Toolset):
    """Gives a model a browser: ``browser_open``, ``browser_read``, ``browser_click``, ``browser_type`` and, with a
    workspace, ``browser_screenshot``.

    Pages run their scripts, in Chromium's own sandbox (not when this process runs as root: Chromium has none then).
    Private, loopback and link-local addresses cannot be reached unless they are allowed here.

    Parameters:
        allow_networks: addresses that may be reached though they are not public, as in ``["10.1.0.0/16"]``.
        ports: that may be connected to; None: all.
        workspace: where screenshots are saved; None: there are none.
        executable: Chromium; None: see `find_chromium`, else one that Playwright has installed.
        arguments: more of them for Chromium, such as ``--no-sandbox`` where the system does not let it have one.
        timeout_s: deadline of an action, in seconds.
        idle_s: a browser that nobody used for so long is closed.
        text_limit: how many characters of a page a result has; the model can ask for what follows.

    Raises:
        MissingExtra: Playwright is not installed.
        ConfigurationError: as `AddressRules` and `Workspace`.
    """

    def __init__(
        self,
        *,
        allow_networks: Sequence[str] = (),
        ports: Sequence[int] | None = (80, 443),
        workspace: Workspace | str | os.PathLike[str] | None = None,
        executable: str | None = None,
        arguments: Sequence[str] = (),
        timeout_s: float = 30.0,
        idle_s: float = 600.0,
        text_limit: int = 20_000,
    ) -> None:
        if importlib.util.find_spec("playwright") is None:
            raise MissingExtra("the browser", extra="browser")
        self.rules = AddressRules(allow_networks, ports)
        self.executable = executable
        self.arguments = (*_ARGUMENTS, *arguments)
        self.timeout_s = timeout_s
        self.idle_s = idle_s
        self._workspace = workspace if workspace is None or isinstance(workspace, Workspace) else Workspace(workspace)
        self._text_limit = text_limit
        self._windows: dict[tuple[str, str], _Window] = {}

    @contextlib.asynccontextmanager
    async def lifespan(self, home: Home) -> AsyncIterator[None]:
        """Load Playwright before the first run: it takes a second, in which the loop would stand still."""
        await asyncio.get_running_loop().run_in_executor(None, importlib.import_module, "playwright.async_api")
        yield

    def folders(self) -> Sequence[Path]:
        """Return the root of its workspace, if it has one."""
        return () if self._workspace is None else (self._workspace.root,)

    def tools(self) -> Sequence[Tool]:
        """The tools."""
        work: list[Callable[..., Any]] = [self.browser_open, self.browser_read, self.browser_click, self.browser_type]
        if self._workspace is not None:
            work.append(self.browser_screenshot)
        return [tool(timeout_s=self.timeout_s + _LAUNCH_S + _MARGIN_S)(one) for one in work]

    async def browser_open(self, call: Call, url: str) -> str:
        """Open a URL in the browser and return what the page shows.

        Elements that can be used have a name in brackets, such as [ref=e5]; it holds until the page changes.

        Parameters:
            url: begins with https:// or http://.
        """
        host, port = self.rules.check_url(url)
        await self.rules.addresses(host, port)

        async def work(page: Page) -> None:
            await page.goto(url, wait_until="domcontentloaded")

        return await self._act(call, work)

    async def browser_read(self, call: Call, start: int = 0, as_text: bool = False) -> str:
        """Read the page that is open.

        Parameters:
            start: from this character on.
            as_text: as running text with links instead of elements with names; better for articles.
        """
        return await self._act(call, None, start=start, as_text=as_text)

    async def browser_click(self, call: Call, ref: str) -> str:
        """Click an element of the page and return what the page shows then.

        Parameters:
            ref: its name, such as e5.
        """

        async def work(page: Page) -> None:
            await (await _element(page, ref)).click()

        return await self._act(call, work)

    async def browser_type(self, call: Call, ref: str, text: str, submit: bool = False) -> str:
        """Put text into a field of the page, in place of what is there, and return what the page shows then.

        Parameters:
            ref: its name, such as e5.
            text: what to put in.
            submit: press Enter afterwards.
        """

        async def work(page: Page) -> None:
            field = await _element(page, ref)
            await field.fill(text)
            if submit:
                await field.press("Enter")

        return await self._act(call, work)

    async def browser_screenshot(self, call: Call, path: str, whole_page: bool = False) -> str:
        """Save a picture (PNG) of the page that is open to a file of the workspace.

        Parameters:
            path: of the file.
            whole_page: all of the page, not only what fits the window.
        """
        assert self._workspace is not None
        async with self._using(call) as window:
            picture = await window.page.screenshot(full_page=whole_page)
        workspace = self._workspace.of(call.run)
        scope = current_scope()
        assert scope is not None, "tools run in a scope"

        def save() -> str:
            return workspace.replace(path, picture, check=check_interrupt)

        saved = await scope.spawn(save, on="thread", name="save")
        return f"saved to {saved} ({len(picture):,} bytes)"

    async def _act(
        self, call: Call, work: Callable[[Page], Any] | None, *, start: int = 0, as_text: bool = False
    ) -> str:
        """Do something with the page, let it settle, and tell what it shows."""
        async with self._using(call) as window:
            if work is not None:
                await work(window.page)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SETTLE_S):
                        await window.page.wait_for_load_state("load", timeout=0)
            page = window.page
            title, url = await page.title(), page.url
            source = await page.content() if as_text else await page.aria_snapshot(mode="ai")
        scope = current_scope()
        assert scope is not None, "tools run in a scope"
        if as_text:
            _, source = await scope.spawn(html_text, source, url, on="thread", name="read")
        shown = source[start : start + self._text_limit]
        end = start + len(shown)
        more = (
            ""
            if end >= len(source)
            else f"\n[characters {start:,} to {end:,} of {len(source):,}; for more: start={end}]"
        )
        return f"[{url}]\n# {title}\n{shown or '[nothing here]'}{more}"

    @contextlib.asynccontextmanager
    async def _using(self, call: Call) -> AsyncIterator[_Window]:
        """The session's browser, to oneself and for the time of one action.

        Raises:
            ToolFailed: it cannot be started, or the action failed or took too long.
        """
        from playwright.async_api import Error

        async with self._turn(call) as window:
            try:
                async with asyncio.timeout(self.timeout_s):
                    yield window
            except TimeoutError as error:
                window.stop_loading()
                raise ToolFailed(f"the page did not answer within {self.timeout_s:g} s") from error
            except Error as error:
                raise ToolFailed(window.told(error)) from error
            except asyncio.CancelledError:
                window.stop_loading()
                raise
            finally:
                window.wake()

    @contextlib.asynccontextmanager
    async def _turn(self, call: Call) -> AsyncIterator[_Window]:
        while True:
            window = await self._window(call)
            async with window.turn:
                await window.quiet()
                if not window.closed:  # it was closed, for want of use, while this waited
                    yield window
                    return

    async def _window(self, call: Call) -> _Window:
        key = (call.run.principal, call.run.session_key)
        window = self._windows.get(key)
        if window is None or window.closed:
            window = self._windows[key] = _Window(self)

            async def live() -> None:
                try:
                    await window.live()
                finally:
                    if self._windows.get(key) is window:
                        del self._windows[key]

            try:
                call.run.background(live, name="browser")
            except BaseException:
                del self._windows[key]
                raise
        await asyncio.wait({window.started}, timeout=_LAUNCH_S)
        if not window.started.done():
            raise ToolFailed(f"the browser did not start within {_LAUNCH_S:g} s")
        if (problem := window.started.result()) is not None:
            raise ToolFailed(problem)
        return window


class _Window:
    """A browser of one session, from its start to its end."""

    def __init__(self, settings: Browser) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._gate = Gate(settings.rules)
        self._context: BrowserContext | None = None
        self._news: asyncio.Future[None] = self._loop.create_future()
        self._stopping: asyncio.Future[None] | None = None
        self.closed = False
        """It ends; nothing can be done with it any more."""
        self.turn = asyncio.Lock()
        self.started: asyncio.Future[str | None] = self._loop.create_future()
        """Done when it can be used, with None; or with the reason why not."""

    @property
    def page(self) -> Page:
        """The newest page."""
        if self._context is None or not self._context.pages:
            raise ToolFailed("the browser was closed; open a page again")
        return self._context.pages[-1]

    def stop_loading(self) -> None:
        """The page shall load no more; whoever waited for it does not any more."""
        if self._stopping is None:
            self._stopping = self._loop.create_future()
        self.wake()

    async def quiet(self) -> None:
        """Wait until that is done, so that it does not hit what comes next."""
        if self._stopping is not None:
            await asyncio.wait({self._stopping}, timeout=_SETTLE_S)

    def wake(self) -> None:
        """Something has happened: look at it, and count the time without use from now."""
        if not self._news.done():
            self._news.set_result(None)

    def told(self, error: Exception) -> str:
        """What went wrong, for a model."""
        text = str(error).split("Call log:")[0].strip()
        if "ERR_TUNNEL_CONNECTION_FAILED" in text and (found := re.search(r" at https?://([^/:\s]+)", text)):
            text = self._gate.refusal(found[1]) or text
        return text[:1000]

    async def live(self) -> None:
        """Run the browser until it is not needed any more."""
        from playwright.async_api import Error, async_playwright

        try:
            with tempfile.TemporaryDirectory(prefix="holdfast-browser-", ignore_cleanup_errors=True) as home:
                async with self._gate, async_playwright() as playwright:
                    await self._start(playwright, home)
                    self.started.set_result(None)
                    await self._attend()
        except (Error, OSError) as error:
            if not self.started.done():
                self.started.set_result(f"the browser could not be started: {str(error).split('Call log:')[0].strip()}")
        finally:
            self.closed = True
            self._context = None
            if not self.started.done():
                self.started.set_result("the browser was stopped while it was started")

    async def _start(self, playwright: Playwright, home: str) -> None:
        settings = self._settings
        root = os.geteuid() == 0
        browser = await playwright.chromium.launch(
            executable_path=settings.executable or find_chromium(),
            args=[*settings.arguments, "--proxy-bypass-list=<-loopback>"],
            env={**clean_environment(), "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home},
            proxy={"server": self._gate.url, "bypass": "<-loopback>"},
            chromium_sandbox=not root,
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
            artifacts_dir=Path(home),
            timeout=_LAUNCH_S * 1000,
        )
        browser.on("disconnected", lambda _: self._end())
        self._context = await browser.new_context(accept_downloads=False, service_workers="block")
        self._context.set_default_timeout(settings.timeout_s * 1000)
        await self._context.new_page()
        self._context.on("page", lambda _: self.wake())

    def _end(self) -> None:
        self.closed = True
        self.wake()

    async def _attend(self) -> None:
        """Keep the number of pages, stop what shall not load on, and see when nobody uses it any more."""
        from playwright.async_api import Error

        while not self.closed:
            await asyncio.wait({self._news}, timeout=self._settings.idle_s)
            if not self._news.done() and not self.turn.locked():
                self.closed = True
                return
            self._news = self._loop.create_future()
            stopping = self._stopping
            with contextlib.suppress(Error):  # the page was closed meanwhile
                await self._tidy(stop_loading=stopping is not None)
            if stopping is not None:
                self._stopping = None
                stopping.set_result(None)

    async def _tidy(self, *, stop_loading: bool) -> None:
        context = self._context
        assert context is not None
        for page in context.pages[:-_PAGES]:
            await page.close()
        if stop_loading:
            for page in context.pages:
                session = await context.new_cdp_session(page)
                await session.send("Page.stopLoading")
                await session.detach()


async def _element(page: Page, ref: str) -> Locator:
    if not _REF.fullmatch(ref):
        raise ToolFailed(
            f"{ref[:40]!r} is no name of an element; they look like e5, and are in what browser_read shows"
        )
    element = page.locator(f"aria-ref={ref}")
    if not await element.count():
        raise ToolFailed(f"there is no element {ref} (any more): names change with the page; read it again")
    return element
