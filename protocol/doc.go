// Package protocol is the client wire protocol of MortarMQ, version 1: frames, operations, error codes, names and
// routing. Broker and client library share it; it does no I/O and keeps no state.
//
// # Frame
//
// All integers are big-endian.
//
//	+--------------+---------+------------------------+
//	| length (u32) | op (u8) | payload (length-1)     |
//	+--------------+---------+------------------------+
//
// length counts the op and the payload and lies in 1..MaxFrameLen. ParseFrame takes frames apart, FrameLen looks at the
// length alone. Neither a bad length nor an unknown op can be skipped: the connection is closed.
//
// # Payloads
//
// Every operation has a struct named after it with two methods: AppendFrame appends the whole frame, Decode reads the
// payload behind the op byte. A variable field is preceded by its length.
//
//	0x01 CONNECT      protocol_version u8 | client_flags u16 (=0) | token_len u16 | token | reserved u32 (=0)
//	0x02 DECLARE      topic_len u16 | topic | partition_count u16 | flags u16 | [settings_len u16 | settings]  flags bit 2
//	                  | [group_len u16 | group | start_policy u8]                                            flags bit 3
//	                  | [reset_to u8 | reset_value u64 | reset_partition u16 | reset_options u8]             flags bit 5
//	0x03 PUB          topic_id u16 | partition u16 | producer_id u64 | producer_seq u64 | flags u16
//	                  | key_len u16 | key | value_len u32 | value
//	0x04 SUB          group_len u16 | group | topic_id u16 | partition u16 (=0xFFFF) | start_policy u8
//	                  | credit_count u16 | credit_bytes u32 | flags u16 | [member_id u64]                      flags bit 3
//	                  | [settings_len u16 | settings]                                                        flags bit 4
//	0x05 ACK          subscription_id u16 | topic_id u16 | partition u16 | seq u64 | delivery_id u64
//	                  | ownership_epoch u64 | flags u16
//	0x06 NACK         subscription_id u16 | topic_id u16 | partition u16 | seq u64 | delivery_id u64
//	                  | ownership_epoch u64 | reason u8 | flags u16 (=0)
//	0x07 PING         (empty)
//	0x08 ERR          code u16 | request_op u8 | message_len u16 | message
//	0x09 OK           request_op u8 | result_len u32 | result
//	0x0A MSG          subscription_id u16 | topic_id u16 | partition u16 | sequence u64 | delivery_id u64 | attempt u16
//	                  | ownership_epoch u64 | producer_id u64 | producer_seq u64 | flags u16
//	                  | key_len u16 | key | value_len u32 | value
//	0x0B PULL         subscription_id u16 | member_id u64 | membership_epoch u32 | assignment_epoch u32
//	                  | ownership_epochs_len u16 (elements) | ownership_epochs u64[] | max_msgs u16 | max_bytes u32
//	                  | wait_ms u16 | min_bytes u32
//	0x0C HEARTBEAT    subscription_id u16 | member_id u64 | membership_epoch u32 | assignment_epoch u32 | state u8
//	0x0D NOTICE       notice_id u64 | kind u8 | group_id u16 | membership_epoch u32 | assignment_epoch u32
//	                  | ownership_epoch u64 | topic_id u16 | partition u16 | member_id u64
//	0x0E CONTROL_ACK  notice_id u64 | notice_kind u8 | group_id u16 | membership_epoch u32 | assignment_epoch u32
//	                  | ownership_epoch u64 | result u8
//	0x0F CREDIT       subscription_id u16 | membership_epoch u32 | ownership_epoch u64 | mode u8 | credit_count u16
//	                  | credit_bytes u32 | reserved u32 (=0)
//
// The result inside an OK; those of the other operations are empty. AppendOK appends the whole OK frame, Decode reads
// the result:
//
//	DECLARE  topic_id u16 | partition_count u16 | created u8 (0 = created, 1 = existed)
//	PUB      sequence u64 | durability u8 | leader_epoch u64 | commit_seq u64 | result_flags u8
//	SUB      subscription_id u16 | member_id u64 | membership_epoch u32 | assignment_epoch u32
//	CREDIT   granted_count u16 | granted_bytes u32 | outstanding_count u16 | outstanding_bytes u32 | credit_epoch u64
//
// flags of PUB: bits 0-1 the durability asked for, bit 2 (REDRIVEN) says that the message is put back from a dead-letter
// topic. That is stored with it, and bit 2 of its MSG's flags says so.
//
// # Consumer groups in DECLARE and SUB
//
// DECLARE with flag bit 3 (GROUP) is about a consumer group of the topic, which must exist. It creates the group with
// the settings of the tail (none: the defaults) and the start policy, or finds that it exists with the same settings
// (CodeGroupExistsMismatch if not; a DECLARE without settings takes any). With LOOKUP it never creates
// (CodeUnknownGroup), with DELETE it ends the group and its cursors; members are told CodeUnknownGroup. With flag bit 4
// (UPDATE), which goes with GROUP and SETTINGS only, the settings replace those of a group that exists; what is left out
// gets its default. partition_count is 0 or the topic's. The result is the topic's, but created is the group's.
//
// With flag bit 5 (RESET), which goes with GROUP only, the cursors of a group that exists are moved: to the oldest message
// (reset_to 0), behind the newest (1), to the sequence (2) or the time in Unix milliseconds (3) that is reset_value, in
// one partition or, with 0xFFFF, in all. What lies outside of a partition means its nearest end. What was in flight or
// waiting is forgotten. While the group has members that is refused (CodeGroupExistsMismatch), unless reset_options has
// bit 0 (FORCE); bit 1 (DRY_RUN) only tells what would change. The OK, which says that the new positions are durable, has
// behind the result of DECLARE: positions_len u16, then for each one partition u16, from u64, to u64, both ack floors.
//
// SUB with flag bit 4 (SETTINGS) brings group settings: those of the group if it creates it, otherwise they must be the
// same. Flag BROADCAST stands for the setting of that name, and must fit the group with or without other settings.
//
// Group settings are a JSON object; unknown keys are refused. Each key may be left out:
//
//	strategy      "sticky" (default): as few partitions move as balance allows; "averagely", "circle": as RocketMQ does
//	max_attempts  1 to 65535; default: the broker's delivery_max_attempts; in ordered groups none; with rocketmq 17
//	ordered       true: a partition's next message waits until the one before is done
//	retry         "exponential" (default), "rocketmq", or a list of up to 64 milliseconds, 10 to 86400000 (ordered groups:
//	              10 to 30000, default 1000); the last one repeats
//	lease_ms      1000 to 43200000; default: the broker's delivery_lease_ms
//	broadcast     true: every member gets every partition, with a cursor of its own and without retries; goes with
//	              lease_ms only
//
// # Decoding
//
// Decode is strict: a payload that is short or has trailing bytes, a length or an enumeration out of its bounds, a
// reserved field or an undefined flag bit of a request that is not zero is a *PayloadError that names operation, field
// and offset. It does not panic on any input, allocates nothing for a valid payload (except a PULL's list, in the slice
// that the Pull holds), and overwrites every field of its receiver. After an error the receiver's content is undefined.
// Names are the exception: a DECLARE whose topic name is empty, too long or has forbidden characters decodes, because
// CodeInvalidTopic, which ValidateTopic returns, must not cost the connection.
//
// # Buffer ownership
//
// Decoders borrow: byte slices of a decoded struct alias the payload and are valid as long as it is. Encoders copy
// into dst, which they grow as append does, and keep nothing.
//
// # Encoding
//
// An encoder's caller keeps the documented size limits. Breaking one would desynchronize the connection, so it is a bug
// of the caller and panics; sizes that come from outside are checked before (the client library does, with errors).
//
// # Growing the protocol
//
// Optional fields go at the tail of a payload and are declared by a flags bit. New operations, another order or other
// lengths raise the version. A published error code never changes its meaning.
package protocol
