// Package ledger decides which message of a partition a consumer group gets next, and what has become of the ones that it
// got: the leases, acknowledgements, failed attempts and retries of spec "Ledger and ack floor".
//
// It is a pure machine. Nothing here reads a clock, a file or a global: time comes in as a monotonic time.Duration (now),
// wall-clock milliseconds only where they go on record, and chance as a seeded Source. One goroutine owns a Book.
//
// # What is soft and what is on record
//
// A Cursor is the state of one (group, topic, partition); in a broadcast group each member has one of its own. Its operations (Take, Ack, Nack, Lost, ...) change only soft
// state, the leases, and queue events. AppendRecord drains the queued events of all cursors of a journal into one ledger
// record. Whatever must survive a crash (a message is done, an attempt has failed) happens in Apply, which the host calls
// when that record comes back committed, and only then may it answer the client. In between a message is settling: it is
// neither delivered again nor done. So the same Apply serves the leader, a replica and recovery, and
//
//	state after a restart = Load(snapshot) + Apply(every later record) + Restore
//
// in which messages that were in flight are simply available again, without having used an attempt.
//
// # The window
//
// Every message above the ack floor that was handed out and is not done has an entry in the cursor's window, a ring sorted
// by sequence: fresh messages are appended at its end, a retry reuses its entry, and entries leave at the front. Hence the
// floor is the first entry's sequence - 1, everything between two neighbouring entries is done, and memory and snapshots
// are bounded by what is open (Options.MaxOpen, Room), not by history.
//
//	     floor        next-1            last
//	done ... | [5] done [9] [10] done | fresh ... | not committed yet
//
// Whatever a client asks for costs what it changes, beside a search among the open messages (window.find) and, where it is
// about all leases, a look at one mark for each 64 open messages (leases).
//
// # Record, format version 2
//
// A ledger record's value is a version byte and one or more items, all integers big-endian. Items of one record are
// applied in order.
//
//	item      kind u8 | group u16 | topic u16 | partition u16 | body
//	          kind + 128 | group u16 | topic u16 | partition u16 | member u64 | body     of a member's cursor
//	START     1  floor u64                                     the cursor exists; everything up to floor is none of its business
//	DELIVER   2  member u64, ownership_epoch u64, lease_until_ms u64, n u32, n x (first u64, count u32, delivery_id u64)
//	ACK       3  n u32, n x (first u64, count u32)             ascending, disjoint
//	FAIL      4  n u32, n x (seq u64, failures u16, reason u8, delay_ms u32, due_ms u64)   ascending
//	EXHAUSTED 5  seq u64, letters_last u64                     out of attempts; the dead-letter topic ended at letters_last
//	DROP      6  n u32, n x (first u64, count u32)             as ACK: done without having been acknowledged
//	FORGET    7                                                the cursor is gone
//
// The delivery ids of a DELIVER run count up from delivery_id. Failures is the total with this one, so that applying a FAIL
// twice does no harm. Attempt numbers are not recorded: a delivery's attempt is 1 + the failures on record. Version 1, which
// is written where it will do, has no items of members.
package ledger
