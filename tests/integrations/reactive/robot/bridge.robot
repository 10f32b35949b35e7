*** Settings ***
Documentation       The reactive bridge, a graph-like pipeline and a host together, as a program uses them.
Library             tests.integrations.reactive.robot_library.BridgeLibrary
Test Setup          Set The Stage
Test Teardown       Clear The Stage


*** Test Cases ***
A Pipeline Of Two Operators Handles Items Of Many Threads
    Open A Bridge    concurrency=20
    Subscribe A Pipeline Of Two Operators
    Push Items    400    threads=8
    Complete The Source
    Results Should Be    400
    Drain The Bridge
    Nothing Should Be Left

Clean-up From A Foreign Thread Ends Everything At Once
    Open A Bridge    concurrency=20
    Subscribe To Work That Takes For Ever
    Push Items    50    threads=8
    Items At Work Should Be    20
    Clean Up
    Interrupted Should Be    50
    Nothing Should Be Left
    A Later Subscription Should Fail With    ScopeClosed

Clean-up On The Loop Does Not Deadlock
    Open A Bridge    concurrency=5
    Subscribe To Work That Takes For Ever
    Push Items    5
    Items At Work Should Be    5
    Clean Up On The Loop
    Nothing Should Be Left

Two Schedulers Share One Bridge
    Open A Bridge    concurrency=10
    Subscribe And Emit On    pool
    Push Items    100    threads=4
    Complete The Source
    Results Should Be    100
    Subscribe And Emit On    event loop
    Push Items    100    threads=4
    Complete The Source
    Results Should Be    100
    Drain The Bridge
    Nothing Should Be Left

A Disposed Subscription Leaves The Others Alone
    Open A Bridge    concurrency=10
    Subscribe To Work That Takes For Ever
    Push Items    10
    Items At Work Should Be    10
    Dispose The Subscription
    Interrupted Should Be    10
    Subscribe And Emit On    loop
    Push Items    10
    Complete The Source
    Results Should Be    10

A Stream Asks The Sessions Of A Host
    Open A Bridge    concurrency=10
    Start A Host
    Subscribe To Answers Of Sessions    3
    Push Texts    30
    Complete The Source
    Results Should Be    30
    Sessions Should Have Had Runs    3    10

The Log Of A Session Is A Stream
    Open A Bridge    concurrency=10
    Start A Host
    Watch The Log Of Session    s0
    Subscribe To Answers Of Sessions    1
    Push Texts    5
    Complete The Source
    Results Should Be    5
    The Log Should Have Told Answers    5
    Drain The Bridge
    Nothing Should Be Left
