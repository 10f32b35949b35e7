Feature: The reactive bridge owns the tasks that it makes
  A stream's items arrive on any thread, at any time. Each becomes a task that somebody owns,
  and none is lost, kept, or forgotten by the clean-up.

  Scenario: Items of many threads are all worked on
    Given a bridge that works on 10 items at a time
    And a subscription
    When 400 items are pushed by 8 threads
    And the source completes
    Then the stream completes with 400 results
    And never were more than 10 items worked on at a time
    And after a drain nothing is left

  Scenario: The order of the items is kept where it is asked for
    Given a bridge that works on 10 items at a time
    And an ordered subscription
    When 100 items are pushed by 1 thread
    And the source completes
    Then the stream completes with 100 results in order

  Scenario Outline: Clean-up takes along what is at work
    Given a bridge that works on 10 items at a time
    And a subscription to work that takes for ever
    When 30 items are pushed by 3 threads
    And 10 items are at work
    And the bridge is <ended>
    Then the stream fails with "RunInterrupted"
    And 30 items were interrupted
    And nothing is left

    Examples:
      | ended                            |
      | cleaned up from another thread   |
      | cleaned up on its loop           |
      | closed                           |

  Scenario: Clean-up takes along what arrives meanwhile
    Given a bridge that works on 10 items at a time
    And a subscription to work that takes for ever
    When threads go on pushing while the bridge is cleaned up
    Then nothing is left
    And a later subscription fails with "ScopeClosed"

  Scenario: Disposing the subscription interrupts its tasks and no others
    Given a bridge that works on 10 items at a time
    And a subscription to work that takes for ever
    When 5 items are pushed by 1 thread
    And 5 items are at work
    And the subscription is disposed
    Then 5 items were interrupted
    And the stream has told nothing
    When a subscription is made
    And 20 items are pushed by 2 threads
    And the source completes
    Then the stream completes with 20 results

  Scenario: An error ends its stream and interrupts the rest of it
    Given a bridge that works on 10 items at a time
    And a subscription to work that fails on item 7
    When 8 items are pushed by 1 thread
    Then the stream fails with "ValueError"
    And after a drain nothing is left

  Scenario: A slow stream holds its threads back
    Given a bridge that works on 2 items at a time, with room for 4
    And a subscription
    When 200 items are pushed by 4 threads
    And the source completes
    Then the stream completes with 200 results
    And none was dropped

  Scenario Outline: Results are told one at a time on the scheduler that was asked for
    Given a bridge that works on 10 items at a time
    And a subscription that is told on the <scheduler>
    When 200 items are pushed by 4 threads
    And the source completes
    Then the stream completes with 200 results
    And no rule of Rx was broken

    Examples:
      | scheduler  |
      | pool       |
      | event loop |

  Scenario: Items become messages of sessions, and what is cut off is taken back
    Given a bridge that works on 10 items at a time
    And a host
    And a subscription that asks session "ann"
    When 5 texts are pushed
    And the source completes
    Then the stream completes with 5 results
    When a long question is asked and its subscription disposed
    Then the session "ann" is idle
