// Package deadletter is the format of a dead letter: a message that a consumer group could not process, as it is kept in
// the group's dead-letter topic, $dlq.<group>.
//
// A letter is a record of that topic. The record's key is the message's own key, its value an envelope header with the
// message's value behind it, and its timestamp the time when the letter was stored. The package is pure.
//
// # MMDL, format version 1
//
// All integers are big-endian, all lengths in bytes.
//
//	 0      4       5        6          8            10         12          14        16
//	+------+-------+--------+----------+------------+----------+-----------+---------+
//	|MMDL  |version|reason  |attempts  |header_len  |topic_id  |partition  |flags    |
//	|      |u8 = 1 |u8      |u16       |u16         |u16       |u16        |u16      |
//	+------+-------+--------+----------+------------+----------+-----------+---------+
//	 16           24              32               40                  48
//	+------------+---------------+----------------+-------------------+
//	|sequence u64|producer_id u64|producer_seq u64|published_unix_ms  |
//	|            |               |                |u64                |
//	+------------+---------------+----------------+-------------------+
//	 48                 56            header_len
//	+------------------+-------------+---------------------------
//	|ended_unix_ms u64 |topic name   | the message's value ...
//	+------------------+-------------+---------------------------
//
// header_len counts everything before the value: 56 and the name, at most 311 of the 512 that the specification allows.
// topic_id, partition and sequence are where the message is stored;
// the name is that of the topic, for which the id may mean nothing any more. flags are those of the message's record
// (bit1 tombstone, others 0; the key flag follows from the letter's key). attempts counts the deliveries that failed.
// published_unix_ms is the message record's own timestamp, ended_unix_ms the wall clock when the group gave it up.
//
//	reason  1 nack        the last attempt was refused
//	        2 expired     the lease of the last attempt ran out
//	        3 connection  the connection was lost during the last attempt
//	        4 rejected    a consumer refused the message for good
package deadletter
