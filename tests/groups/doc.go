// Package groups tests, against real mortard processes, how consumers share a topic: that partitions have one owner at a
// time whoever comes, goes, dies or is frozen, and that nothing is lost or turned round on the way.
//
// A Scenario has members in processes of their own (client.Consumer in this program, started again: RunIfMember), so that
// kill -9 and SIGSTOP are real. What passes on their connections is reported to the parent by a tap below the client
// library, before it has consequences; a history compares it all:
//
//   - each message is acknowledged, or in one dead letter, and there with the reason and number of attempts that it has;
//   - no delivery is made after an ACK that was answered with OK;
//   - attempts count up and stay within the maximum, across restarts of the broker;
//   - the deliveries of a partition under one ownership epoch go to one member;
//   - where nobody is ended by force, each message is handled exactly as often as it should be;
//   - the group's counters say the same.
//
// A Hostile run has clients that send whatever the protocol has frames for, with ids and epochs of their own and of others,
// and asks that they hurt nobody else: answers in order, credit never overdrawn, ACKs of others' messages refused, the
// same history for the groups that they are members of, and nothing left of them in the end.
//
// Command tests/crash/cmd/soak runs both with ever new seeds.
package groups
