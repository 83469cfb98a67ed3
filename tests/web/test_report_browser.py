"""The report in a real browser."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.browser import BROWSER, DRIVER, browser
from support.command_line import asel, fill, report

from asel import CacheKey


@pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="the report is not looked at in a browser: install Debian's chromium and chromium-driver",
)
@pytest.mark.timeout(90)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Selenium leaves its pipe to the driver to the collector
def test_the_page_works_in_a_browser(tmp_path):
    """Sorting, filtering and opening by mouse and keyboard, on a phone, in dark mode, without errors in the log."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    cpu = "cpu AMD EPYC, 26/2/1, 2 cores, avx512_bf16+avx512f+avx2+avx+sse4_2|cpu"  # a name wider than a phone
    norm = report(64, op="norm@v1")
    on_cpu = replace(norm, key=CacheKey(cpu, norm.key.op_id, norm.key.call_key, norm.key.call))
    store = fill(tmp_path / "cache", report(512), report(1024, fastest=32), on_cpu)
    page = tmp_path / "report.html"
    assert asel("report", store, "-o", page).code == 0

    with browser(tmp_path / "profile") as driver:

        def calls():
            cells = driver.find_elements(By.CSS_SELECTOR, "#keys > tbody > tr:not(.details) > td:nth-child(2)")
            return [cell.text.partition("[")[2].partition(",")[0] for cell in cells]

        def active():
            return driver.switch_to.active_element

        driver.get(page.as_uri())
        assert calls() == ["512", "1024", "64"]
        assert "3 keys of 2 operations" in driver.find_element(By.ID, "summary").text
        assert len(driver.find_elements(By.CSS_SELECTOR, "#speedups svg, #costs svg")) == 2
        ticks = driver.find_elements(By.CSS_SELECTOR, "#speedups [aria-label='y-axis tick label'] text")
        assert [tick.text for tick in ticks if tick.text] == ["0", "1", "2"]  # keys come whole

        speedup = driver.find_element(By.XPATH, "//th/button[.='Speed-up']")
        speedup.click()
        assert calls()[-1] == "1024"  # its winner is the heuristic's config; numbers start with the largest
        assert speedup.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
        speedup.click()
        assert calls()[0] == "1024"

        active().send_keys("/")
        active().send_keys("norm f32[64")
        assert calls() == ["64"]
        assert driver.find_element(By.ID, "count").text == "1 of 3 keys"
        active().send_keys(Keys.BACKSPACE * len("norm f32[64"))
        assert len(calls()) == 3

        first = driver.find_element(By.CSS_SELECTOR, ".opener")
        first.send_keys(Keys.ARROW_DOWN)
        active().send_keys(Keys.ENTER)
        opened = driver.find_element(By.CSS_SELECTOR, ".details")
        assert len(opened.find_elements(By.CSS_SELECTOR, "svg circle")) == 12  # three candidates of four samples
        assert "cannot reshape 512 into 96" in opened.text
        assert "1 candidate: the tune's budget of 60 s was spent (rows=4096)" in opened.text
        assert opened.find_element(By.CSS_SELECTOR, "td.winner").text == "rows=64"

        dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
        assert driver.execute_script("return document.documentElement.scrollWidth") == 390
        assert driver.find_element(By.ID, "sort").is_displayed()

        active().send_keys(Keys.ESCAPE)
        assert not driver.find_elements(By.CSS_SELECTOR, ".details")
        driver.get(f"{page.as_uri()}#00000400cafe")
        driver.refresh()
        assert calls() == ["1024"]  # the address of a key shows that key alone, opened
        assert driver.find_elements(By.CSS_SELECTOR, ".details svg")
        assert "it is the heuristic's config" in driver.find_element(By.CSS_SELECTOR, ".details dl").text
        assert driver.get_log("browser") == []
        assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
