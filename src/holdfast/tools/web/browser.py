"""Tools that use web pages in a real browser: open, read, click, type, screenshot. Needs the extra ``browser``.

Invariants
- A session has at most one browser. The browser runs as background work of the session's activation, so interrupting
  a run does not end the browser. Stopping the session or reaching the idle timeout ends the browser with all its
  processes.
- Chromium runs behind a wall of its own, unless the operator chose that programs run without walls; see `chromium`. Its
  only route to the network is the proxy, so a page cannot reach private addresses by any kind of request.
- The actions of a browser run one at a time, each with a deadline. If an action is interrupted, the page stops
  loading.
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
from holdfast.agents.tool import Tool, Toolset, ToolsetContext, tool
from holdfast.errors import MissingExtra, ToolFailed
from holdfast.runtime import current_scope
from holdfast.tools.addresses import AddressRules
from holdfast.tools.files.changes import OTHER_NAME, WorkspaceChange, change_workspace
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.sandbox.choice import are_programs_unwalled
from holdfast.tools.web.chromium import Chromium, ChromiumProfile, open_chromium
from holdfast.tools.web.text import html_text

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Locator, Page, Playwright

    from holdfast.agents.run import Run

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
"""Flags that send all traffic through the proxy and disable requests that no page has made."""


def find_chromium() -> str | None:
    """Return the path in the environment variable ``HOLDFAST_CHROMIUM``, or else the first Chromium in PATH."""
    named = os.environ.get("HOLDFAST_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser(Toolset):
    """Browser tools for a model: ``browser_open``, ``browser_read``, ``browser_click``, ``browser_type`` and, with a
    workspace, ``browser_screenshot``.

    Chromium runs behind a wall of its own, which shows it nothing of this machine but the system. This needs the
    sandbox ``linux`` with namespaces, or ``bwrap``. If the operator chose to run programs without walls, page scripts
    run in Chromium's own sandbox, unless this process runs as root: then they run without one. Private, loopback and
    link-local addresses are unreachable unless `allow_networks` includes them.

    Parameters:
        allow_networks: non-public addresses that pages may reach, such as ``["10.1.0.0/16"]``.
        ports: ports that pages may connect to; None allows all ports.
        workspace: workspace that screenshots are saved to; None disables screenshots.
        executable: path of Chromium; None uses the result of `find_chromium`, or else Playwright's own Chromium.
        arguments: additional Chromium arguments, such as ``--no-sandbox`` if the system does not allow the sandbox.
        timeout_s: timeout of an action, in seconds.
        idle_s: idle time in seconds after which a browser is closed.
        text_limit: maximum number of page characters in a result; the model can request the rest.

    Raises:
        MissingExtra: if Playwright is not installed.
        ConfigurationError: if `AddressRules` rejects `allow_networks` or `Workspace` rejects `workspace`.
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
        self.allow_networks = tuple(allow_networks)
        self.executable = executable
        self.arguments = (*_ARGUMENTS, *arguments)
        self.timeout_s = timeout_s
        self.idle_s = idle_s
        self._workspace = workspace if workspace is None or isinstance(workspace, Workspace) else Workspace(workspace)
        self._text_limit = text_limit
        self._windows: dict[tuple[str, str], _Window] = {}

    @property
    def unwalled(self) -> bool:  # type: ignore[override]  # known after the machine was probed
        """Whether the operator chose that programs run without a wall."""
        return are_programs_unwalled()

    @contextlib.asynccontextmanager
    async def lifespan(self, home: ToolsetContext) -> AsyncIterator[None]:
        """Import Playwright in a thread before the first run, because that takes a second and would block the loop.

        Keep the records of what sessions made while the host runs.
        """
        await asyncio.get_running_loop().run_in_executor(None, importlib.import_module, "playwright.async_api")
        if self._workspace is not None:
            self._workspace.keep_records(home.data_dir)
        yield

    def folders(self) -> Sequence[Path]:
        """Return the root of the workspace; the result is empty if no workspace was given."""
        return () if self._workspace is None else (self._workspace.root,)

    def tools(self) -> Sequence[Tool]:
        """Return the browser tools."""
        work: list[Callable[..., Any]] = [self.browser_open, self.browser_read, self.browser_click, self.browser_type]
        if self._workspace is not None:
            work.append(self.browser_screenshot)
        return [tool(timeout_s=self.timeout_s + _LAUNCH_S + _MARGIN_S)(one) for one in work]

    async def browser_open(self, call: Call, url: str) -> str:
        """Open a URL in the browser and return the page's content.

        Usable elements have a name in brackets, such as [ref=e5]; names are valid until the page changes.

        Parameters:
            url: starts with https:// or http://.
        """
        host, port = self.rules.check_url(url)
        await self.rules.addresses(host, port)

        async def work(page: Page) -> None:
            await page.goto(url, wait_until="domcontentloaded")

        return await self._act(call, work)

    async def browser_read(self, call: Call, start: int = 0, as_text: bool = False) -> str:
        """Read the current page.

        Parameters:
            start: character offset to start at.
            as_text: return plain text with links instead of named elements; better for articles.
        """
        return await self._act(call, None, start=start, as_text=as_text)

    async def browser_click(self, call: Call, ref: str) -> str:
        """Click an element of the page and return the page's new content.

        Parameters:
            ref: the element's name from the page content, such as e5.
        """

        async def work(page: Page) -> None:
            await (await _element(page, ref)).click()

        return await self._act(call, work)

    async def browser_type(self, call: Call, ref: str, text: str, submit: bool = False) -> str:
        """Replace the text of a field of the page and return the page's new content.

        Parameters:
            ref: the field's name from the page content, such as e5.
            text: the new text.
            submit: press Enter afterwards.
        """

        async def work(page: Page) -> None:
            field = await _element(page, ref)
            await field.fill(text)
            if submit:
                await field.press("Enter")

        return await self._act(call, work)

    async def browser_screenshot(self, call: Call, path: str, whole_page: bool = False) -> str:
        """Save a screenshot (PNG) of the current page to a file in the workspace.

        Parameters:
            path: path of the file.
            whole_page: capture the whole page, not only the visible part.
        """
        workspace = self._workspace
        assert workspace is not None
        async with self._using(call) as window:
            picture = await window.page.screenshot(full_page=whole_page)

        def save(change: WorkspaceChange) -> str:
            return change.replace(path, picture)

        saved = await change_workspace(call, workspace, save, advice=OTHER_NAME)
        return f"saved to {saved} ({len(picture):,} bytes)"

    async def _act(
        self, call: Call, work: Callable[[Page], Any] | None, *, start: int = 0, as_text: bool = False
    ) -> str:
        """Run an action on the page, let the page settle, and return the page's content."""
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
        return f"[{url}]\n# {title}\n{shown or '[empty]'}{more}"

    @contextlib.asynccontextmanager
    async def _using(self, call: Call) -> AsyncIterator[_Window]:
        """Yield the session's browser for the exclusive use of one action.

        Raises:
            ToolFailed: if the browser does not start, or if the action fails or times out.
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
                raise ToolFailed(await window.told(error)) from error
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
                if not window.closed:  # the idle timeout may have closed it meanwhile
                    yield window
                    return

    async def _window(self, call: Call) -> _Window:
        key = (call.run.principal, call.run.session_key)
        window = self._windows.get(key)
        if window is None or window.closed:
            window = self._windows[key] = _Window(self, call.run)

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
    """One browser of a session, from start to end."""

    def __init__(self, settings: Browser, run: Run) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._principal = run.principal
        self._programs = run.context.host.programs
        self._chromium: Chromium | None = None
        self._context: BrowserContext | None = None
        self._news: asyncio.Future[None] = self._loop.create_future()
        self._stopping: asyncio.Future[None] | None = None
        self.closed = False
        """Whether the browser is shutting down or has ended, and is therefore unusable."""
        self.turn = asyncio.Lock()
        self.started: asyncio.Future[str | None] = self._loop.create_future()
        """Outcome of the start: None once the browser is ready, or the reason why the start failed."""

    @property
    def page(self) -> Page:
        """The newest open page."""
        if self._context is None or not self._context.pages:
            raise ToolFailed("the browser was closed; open a page again")
        return self._context.pages[-1]

    def stop_loading(self) -> None:
        """Request that all pages stop loading, because the action's caller no longer waits."""
        if self._stopping is None:
            self._stopping = self._loop.create_future()
        self.wake()

    async def quiet(self) -> None:
        """Wait until a pending `stop_loading` is done, so that it does not affect the next action."""
        if self._stopping is not None:
            await asyncio.wait({self._stopping}, timeout=_SETTLE_S)

    def wake(self) -> None:
        """Wake `_attend` and restart the idle timeout."""
        if not self._news.done():
            self._news.set_result(None)

    async def told(self, error: Exception) -> str:
        """Return the message of a browser error, shortened for a model."""
        text = str(error).split("Call log:")[0].strip()
        if self._chromium is not None:
            text = await self._chromium.explain(text)
        return text[:1000]

    async def live(self) -> None:
        """Run the browser until it is closed or has been idle for too long."""
        from playwright.async_api import Error, async_playwright

        try:
            with tempfile.TemporaryDirectory(prefix="holdfast-browser-", ignore_cleanup_errors=True) as home:
                async with async_playwright() as playwright:
                    async with open_chromium(self._profile(playwright), Path(home)) as self._chromium:
                        await self._start(playwright, home)
                        self.started.set_result(None)
                        await self._attend()
        except (Error, OSError, ToolFailed) as error:
            if not self.started.done():
                fault = (self._chromium and self._chromium.fault) or str(error).split("Call log:")[0].strip()
                self.started.set_result(f"the browser failed to start: {fault}")
        finally:
            self.closed = True
            self._context = None
            if not self.started.done():
                self.started.set_result("the browser was stopped during startup")

    def _profile(self, playwright: Playwright) -> ChromiumProfile:
        settings = self._settings
        return ChromiumProfile(
            executable=settings.executable or find_chromium() or playwright.chromium.executable_path,
            arguments=settings.arguments,
            networks=settings.allow_networks,
            ports=settings.rules.ports,
            principal=self._principal,
            programs=self._programs,
        )

    async def _start(self, playwright: Playwright, home: str) -> None:
        settings = self._settings
        assert self._chromium is not None, "it is open"
        browser = await playwright.chromium.launch(
            **self._chromium.options,
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
        """Close surplus pages, stop page loads on request, and close the browser when it is idle."""
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
            f"{ref[:40]!r} is not an element name; names look like e5 and appear in the output of browser_read"
        )
    element = page.locator(f"aria-ref={ref}")
    if not await element.count():
        raise ToolFailed(f"element {ref} not found; names change with the page, so read the page again")
    return element
