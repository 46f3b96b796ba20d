package peers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
)

// AMQP 0-9-1 as far as a producer with confirms and a consumer need it. A frame is type, channel, size, payload and an end
// octet; a method's payload begins with class and method (AMQP 0-9-1 specification, sections 2.3.5 and 1).

const (
	amqpMethod = 1
	amqpHeader = 2
	amqpBody   = 3
	amqpBeat   = 8
	amqpEnd    = 0xCE

	amqpFrameOverhead = 8
	amqpFrameMax      = 131072 // RabbitMQ's default
	amqpChannel       = 1
)

// amqpID is class << 16 | method.
type amqpID uint32

const (
	amqpConnectionStart   amqpID = 10<<16 | 10
	amqpConnectionStartOK amqpID = 10<<16 | 11
	amqpConnectionTune    amqpID = 10<<16 | 30
	amqpConnectionTuneOK  amqpID = 10<<16 | 31
	amqpConnectionOpen    amqpID = 10<<16 | 40
	amqpConnectionOpenOK  amqpID = 10<<16 | 41
	amqpConnectionClose   amqpID = 10<<16 | 50
	amqpChannelOpen       amqpID = 20<<16 | 10
	amqpChannelOpenOK     amqpID = 20<<16 | 11
	amqpChannelClose      amqpID = 20<<16 | 40
	amqpQueueDeclare      amqpID = 50<<16 | 10
	amqpQueueDeclareOK    amqpID = 50<<16 | 11
	amqpBasicQos          amqpID = 60<<16 | 10
	amqpBasicQosOK        amqpID = 60<<16 | 11
	amqpBasicConsume      amqpID = 60<<16 | 20
	amqpBasicConsumeOK    amqpID = 60<<16 | 21
	amqpBasicPublish      amqpID = 60<<16 | 40
	amqpBasicDeliver      amqpID = 60<<16 | 60
	amqpBasicAck          amqpID = 60<<16 | 80
	amqpBasicNack         amqpID = 60<<16 | 120
	amqpConfirmSelect     amqpID = 85<<16 | 10
	amqpConfirmSelectOK   amqpID = 85<<16 | 11
)

// amqpBasicClass is the class of content headers; of the properties only delivery-mode (bit 12) is set, to persistent.
const (
	amqpBasicClass      = 60
	amqpHasDeliveryMode = 1 << 12
	amqpPersistent      = 2
)

// amqpFrame is one frame; args alias the buffer.
type amqpFrame struct {
	kind uint8
	id   amqpID // of a method
	args []byte // a method's arguments, or the payload of other frames
}

// amqpNext takes one frame off b; n is 0 where it is incomplete. Closing methods of the server are errors.
func amqpNext(b []byte) (f amqpFrame, n int, err error) {
	if len(b) < 7 {
		return f, 0, nil
	}
	size := int64(binary.BigEndian.Uint32(b[3:]))
	if size > 64<<20 {
		return f, 0, fmt.Errorf("amqp: a frame of %d bytes", size)
	}
	n = int(size) + amqpFrameOverhead
	if len(b) < n {
		return f, 0, nil
	}
	if b[n-1] != amqpEnd {
		return f, 0, errors.New("amqp: a frame without its end")
	}
	f.kind, f.args = b[0], b[7:n-1]
	if f.kind != amqpMethod {
		return f, n, nil
	}
	if len(f.args) < 4 {
		return f, 0, errors.New("amqp: a method without its number")
	}
	f.id, f.args = amqpID(binary.BigEndian.Uint32(f.args)), f.args[4:]
	if f.id == amqpConnectionClose || f.id == amqpChannelClose {
		err = fmt.Errorf("amqp: the server closed: %q", f.args)
	}
	return f, n, err
}

// amqpArgs builds a method's arguments.
type amqpArgs []byte

func (a amqpArgs) short(v uint16) amqpArgs { return binary.BigEndian.AppendUint16(a, v) }
func (a amqpArgs) long(v uint32) amqpArgs  { return binary.BigEndian.AppendUint32(a, v) }
func (a amqpArgs) octet(v uint8) amqpArgs  { return append(a, v) }
func (a amqpArgs) str(s string) amqpArgs   { return append(append(a, byte(len(s))), s...) }

func (a amqpArgs) longStr(s string) amqpArgs {
	return append(a.long(uint32(len(s))), s...)
}

// table appends a field table of strings (type 'S').
func (a amqpArgs) table(pairs ...string) amqpArgs {
	var t amqpArgs
	for i := 0; i+1 < len(pairs); i += 2 {
		t = t.str(pairs[i]).octet('S').longStr(pairs[i+1])
	}
	return append(a.long(uint32(len(t))), t...)
}

func amqpAppendMethod(dst []byte, channel uint16, id amqpID, args []byte) []byte {
	dst = append(dst, amqpMethod)
	dst = binary.BigEndian.AppendUint16(dst, channel)
	dst = binary.BigEndian.AppendUint32(dst, uint32(4+len(args)))
	dst = binary.BigEndian.AppendUint32(dst, uint32(id))
	dst = append(dst, args...)
	return append(dst, amqpEnd)
}

// amqpAppendContent appends the content header and the body of a persistent message, in frames of at most frameMax bytes.
func amqpAppendContent(dst, body []byte, frameMax int) []byte {
	const headerLen = 2 + 2 + 8 + 2 + 1
	dst = append(dst, amqpHeader, 0, amqpChannel)
	dst = binary.BigEndian.AppendUint32(dst, headerLen)
	dst = binary.BigEndian.AppendUint16(dst, amqpBasicClass)
	dst = binary.BigEndian.AppendUint16(dst, 0) // weight
	dst = binary.BigEndian.AppendUint64(dst, uint64(len(body)))
	dst = binary.BigEndian.AppendUint16(dst, amqpHasDeliveryMode)
	dst = append(dst, amqpPersistent, amqpEnd)
	for len(body) > 0 {
		part := body[:min(len(body), frameMax-amqpFrameOverhead)]
		body = body[len(part):]
		dst = append(dst, amqpBody, 0, amqpChannel)
		dst = binary.BigEndian.AppendUint32(dst, uint32(len(part)))
		dst = append(dst, part...)
		dst = append(dst, amqpEnd)
	}
	return dst
}

// amqpAck reads the arguments of an ack or nack: delivery tag and "multiple".
func amqpAck(args []byte) (tag uint64, all bool, err error) {
	if len(args) < 9 {
		return 0, false, errors.New("amqp: an ack without its arguments")
	}
	return binary.BigEndian.Uint64(args), args[8]&1 != 0, nil
}

// amqpDeliveryTag reads the tag behind basic.deliver's first argument, the consumer's name.
func amqpDeliveryTag(args []byte) (uint64, error) {
	if len(args) < 1 || len(args) < 1+int(args[0])+8 {
		return 0, errors.New("amqp: a delivery without its arguments")
	}
	return binary.BigEndian.Uint64(args[1+int(args[0]):]), nil
}

// amqpCall sends a method and waits for the one that answers it, whose arguments check gets.
func amqpCall(c net.Conn, channel uint16, id amqpID, args []byte, answer amqpID, check func(args []byte) error) error {
	return amqpExchange(c, amqpAppendMethod(nil, channel, id, args), answer, check)
}

func amqpExchange(c net.Conn, out []byte, answer amqpID, check func(args []byte) error) error {
	return exchange(c, out, func(b []byte) (int, error) {
		f, n, err := amqpNext(b)
		if err != nil || n == 0 {
			return 0, err
		}
		if f.kind != amqpMethod || f.id != answer {
			return 0, fmt.Errorf("amqp: frame type %d, method %#x in place of %#x", f.kind, f.id, answer)
		}
		if check != nil {
			err = check(f.args)
		}
		return n, err
	})
}

// amqpConnect opens a connection as guest and its channel 1, and returns the largest frame.
func amqpConnect(c net.Conn) (frameMax int, err error) {
	if err := amqpExchange(c, []byte("AMQP\x00\x00\x09\x01"), amqpConnectionStart, nil); err != nil {
		return 0, err
	}
	var channels uint16
	err = amqpCall(c, 0, amqpConnectionStartOK, amqpArgs{}.table().str("PLAIN").longStr("\x00guest\x00guest").str("en_US"), amqpConnectionTune,
		func(args []byte) error {
			if len(args) < 8 {
				return errors.New("amqp: a tune without its arguments")
			}
			channels = binary.BigEndian.Uint16(args)
			frameMax = int(min(binary.BigEndian.Uint32(args[2:]), math.MaxInt32))
			return nil
		})
	if err != nil {
		return 0, err
	}
	if frameMax == 0 || frameMax > amqpFrameMax {
		frameMax = amqpFrameMax
	}
	out := amqpAppendMethod(nil, 0, amqpConnectionTuneOK, amqpArgs{}.short(channels).long(uint32(frameMax)).short(0)) // no heartbeats
	out = amqpAppendMethod(out, 0, amqpConnectionOpen, amqpArgs{}.str("/").str("").octet(0))
	if err := amqpExchange(c, out, amqpConnectionOpenOK, nil); err != nil {
		return 0, err
	}
	return frameMax, amqpCall(c, amqpChannel, amqpChannelOpen, amqpArgs{}.str(""), amqpChannelOpenOK, nil)
}
