// Package peerwire is the format of what the nodes of a cluster send each other: frames, their bodies, and the pace of a
// catch-up. It is pure. Package net/peer moves the frames and draws the handshake, package engine means something by them.
//
// All integers are big-endian, all lengths in bytes. A decoder takes nothing but what the encoder can have made: reserved
// bytes are zero, nothing is left over.
//
// # Frame
//
//	 0     1        2     3       4        8             16
//	+-----+--------+-----+-------+--------+-------------+----------
//	|0xB7 |version |kind |flags  |len u32 |checksum u64 | body ...
//	+-----+--------+-----+-------+--------+-------------+----------
//
// len counts the body, at most MaxBody. The checksum is xxHash64 of bytes 0 to 7 and the body, with a seed that both ends of a
// connection have derived in their handshake: a frame of another connection doesn't pass. version is the one that was agreed
// on, 0 in a handshake. flags bit0 says that the body is an S2 block of the real one, which is at most MaxBody too; only the
// bulk lane has such frames.
//
// # Lanes
//
// Two nodes have three connections, so that nothing waits behind what is larger: control for heartbeats and elections, log for
// rounds and what became of them, bulk for everything that may take long. PING and PONG (a u64 that comes back as it was) go
// over all of them.
//
// # Lane control: MESSAGE
//
// A replica.Message. All fields are there whatever the kind; those that it doesn't use are zero.
//
//	 0    1     2      3        4      5     6       8         12       14          16
//	+----+-----+------+--------+------+-----+-------+---------+--------+-----------+---------
//	|kind|stage|reason|standing|flags |  0  |logs   |epoch u32|ends n  |commits m  |cluster
//	|u8  |u8   |u8    |u8      |bit0 granted|u16    |         |u16     |u16        |16 bytes
//	|    |     |      |        |bit1 confirmed      |         |        |           |
//	+----+-----+------+--------+------+-----+-------+---------+--------+-----------+---------
//	 32           40          48         56
//	+------------+-----------+----------+------------------------------------------+-------------+
//	|instance u64|session u64|sent i64  |epoch u32, index u64, commit u64,         |commit u64   |
//	|            |           |          |floor epoch u32, floor index u64  n times |      m times|
//	+------------+-----------+----------+------------------------------------------+-------------+
//
// # Lane log
//
// APPEND. The payload is the round's entries as they stand in the leader's journal; it is checked by the journal that takes
// it. The round's index is prev_index + 1. A probe has no payload and a point_epoch of 0.
//
//	 0       2     4          8               12              16              24          32
//	+-------+-----+----------+---------------+---------------+---------------+-----------+----------
//	|log u16|0 0  |epoch u32 |prev_epoch u32 |point_epoch u32|prev_index u64 |commit u64 | payload
//	+-------+-----+----------+---------------+---------------+---------------+-----------+----------
//
// FLUSHED. flags bit0 says that the follower's flushes count.
//
//	 0       2      3    4          8          16            24
//	+-------+------+----+----------+----------+-------------+
//	|log u16|flags |0   |epoch u32 |index u64 |instance u64 |
//	+-------+------+----+----------+----------+-------------+
//
// REJECT. verdict is a replica.VerdictKind, epoch the APPEND's, known the highest that the follower has seen, last and commit
// are its log's end.
//
//	 0       2        3   4          8          12              16              24          32            40
//	+-------+--------+---+----------+----------+---------------+---------------+-----------+-------------+
//	|log u16|verdict |0  |epoch u32 |known u32 |last_epoch u32 |last_index u64 |commit u64 |instance u64 |
//	+-------+--------+---+----------+----------+---------------+---------------+-----------+-------------+
//
// # Lane bulk
//
// Every frame begins with the transfer that it belongs to: log u16, id u32. Behind that:
//
//	FETCH          after_index u64, upto_epoch u32, upto_index u64
//	FETCHED        prev_epoch u32, prev_index u64, epoch u32, index u64, commit u64, payload as in APPEND
//	FETCH_END      ok u8, reason (u16 length, text)
//	CATCHUP        repair u8, more u8, n u32, n times: stream, 0 0, next u64
//	RECORDS        stream, first u64, count u32, payload: records back to back
//	SKIP           stream, next u64
//	SNAPSHOT       what u8, 0, epoch u32, position u64, offset u64, total u64, payload
//	CATCHUP_DONE   epoch u32, index u64, commit u64
//	CATCHUP_ACK    bytes u64
//	CATCHUP_CANCEL reason (u16 length, text)
//	BEHIND         leader_epoch u32, base_epoch u32, base_index u64, committed_epoch u32, committed_index u64
//
// A stream is kind u8, 0, topic u16, partition u16. The node that asks chooses the id. FETCH is answered by FETCHED ... and one
// FETCH_END, or by BEHIND. CATCHUP is answered by RECORDS, SKIP and SNAPSHOT in any order and CATCHUP_DONE, which the asking node
// acknowledges in between with CATCHUP_ACK; see Flow. CATCHUP_CANCEL in their place ends it early. A connection that breaks
// ends all transfers on it.
package peerwire
