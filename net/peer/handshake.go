package peer

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/mortarmq/mortarmq/engine/peerwire"
	"github.com/mortarmq/mortarmq/engine/replica"
)

// Layout of the handshake, which no version may change; drawn in the package documentation. A later version may append
// fields to HELLO and CHALLENGE: what an older node doesn't know it passes over, and proves together with the rest.
const (
	handshakeVersion = 0
	nonceLen         = 32
	proofLen         = sha256.Size
	helloLen         = 60
	refuseLen        = 4
	maxHandshakeBody = 512
	maxRefusalText   = 256
)

// The reasons of a REFUSE.
const (
	refusedVersion = 1 // there is no version that both speak
	refusedNode    = 2 // the caller, or the node that it wants, is not one that this node knows
	refusedSecret  = 3
	refusedCluster = 4
	refusedLogs    = 5
)

// Why nodes don't connect, for errors.Is. Both ends see the same one.
var (
	ErrVersion = errors.New("the nodes have no version of the peer protocol in common")
	ErrNode    = errors.New("the node is not one of this cluster's")
	ErrSecret  = errors.New("the nodes do not share a secret")
	ErrCluster = errors.New("the nodes belong to different clusters")
	ErrLogs    = errors.New("the nodes have different numbers of logs")
)

var refusals = map[uint16]error{
	refusedVersion: ErrVersion, refusedNode: ErrNode, refusedSecret: ErrSecret, refusedCluster: ErrCluster, refusedLogs: ErrLogs,
}

// refusal is an error that the other node is told of.
type refusal struct {
	code uint16
	text string
}

func (r *refusal) Error() string { return r.text }
func (r *refusal) Unwrap() error { return refusals[r.code] }

func refuse(code uint16, format string, args ...any) error {
	return &refusal{code, fmt.Sprintf(format, args...)}
}

// accepted is a connection whose handshake is complete.
type accepted struct {
	conn net.Conn
	from replica.NodeID
	lane peerwire.Lane
	peer Peer
	keys struct{ in, out uint64 } // seeds of the checksums
}

// hello is what both sides say about themselves: HELLO and CHALLENGE. The raw bytes are what the proofs are of.
type hello struct {
	min, max uint8 // of a CHALLENGE: the chosen version, twice
	lane     peerwire.Lane
	from, to replica.NodeID
	logs     uint16
	cluster  replica.ClusterID
	raw      []byte
}

// encode fills in raw with a fresh nonce.
func (h *hello) encode() {
	b := make([]byte, 0, helloLen)
	b = append(b, h.min, h.max, byte(h.lane), 0)
	b = binary.BigEndian.AppendUint16(b, uint16(h.from))
	b = binary.BigEndian.AppendUint16(b, uint16(h.to))
	b = binary.BigEndian.AppendUint16(b, h.logs)
	b = append(b, 0, 0)
	b = append(b, h.cluster[:]...)
	var nonce [nonceLen]byte
	_, _ = rand.Read(nonce[:]) // never fails
	h.raw = append(b, nonce[:]...)
}

// decode takes over raw.
func (h *hello) decode(k peerwire.Kind, raw []byte) error {
	if len(raw) < helloLen {
		return fmt.Errorf("%v has %d bytes, not %d at least", k, len(raw), helloLen)
	}
	*h = hello{
		min: raw[0], max: raw[1], lane: peerwire.Lane(raw[2]),
		from: replica.NodeID(binary.BigEndian.Uint16(raw[4:])), to: replica.NodeID(binary.BigEndian.Uint16(raw[6:])),
		logs: binary.BigEndian.Uint16(raw[8:]), cluster: replica.ClusterID(raw[12 : 12+len(h.cluster)]), raw: raw,
	}
	return nil
}

// prove returns what only who knows the secret can say about the two hellos. The label tells the two directions apart, so
// that nobody can be made to say what the other side must say.
func prove(secret []byte, label string, hello, challenge []byte) [proofLen]byte {
	mac := hmac.New(sha256.New, secret)
	_, _ = io.WriteString(mac, label)
	var size [4]byte
	binary.BigEndian.PutUint32(size[:], uint32(len(hello)))
	_, _ = mac.Write(size[:])
	_, _ = mac.Write(hello)
	_, _ = mac.Write(challenge)
	return [proofLen]byte(mac.Sum(nil))
}

// The labels of what is derived from the secret.
const (
	labelDialer   = "mortarmq peer 1: dialer"
	labelAcceptor = "mortarmq peer 1: acceptor"
	labelForth    = "mortarmq peer 1: checksums of the dialer"
	labelBack     = "mortarmq peer 1: checksums of the acceptor"
)

func seed(secret []byte, label string, hello, challenge []byte) uint64 {
	p := prove(secret, label, hello, challenge)
	return binary.BigEndian.Uint64(p[:])
}

// dialHandshake proves this node to the one that was dialled, and that one to this.
func (t *Transport) dialHandshake(conn net.Conn, to replica.NodeID, lane peerwire.Lane) (*accepted, error) {
	me := t.opt.Identity()
	h := hello{
		min: t.opt.minVersion, max: t.opt.maxVersion, lane: lane, from: t.opt.Self, to: to, logs: me.Logs, cluster: me.Cluster,
	}
	h.encode()
	if err := writeHandshake(conn, peerwire.KindHello, h.raw); err != nil {
		return nil, err
	}
	raw, err := readHandshake(conn, peerwire.KindChallenge)
	if err != nil {
		return nil, err
	}
	var c hello
	if err := c.decode(peerwire.KindChallenge, raw); err != nil {
		return nil, err
	}
	if c.min < h.min || c.min > h.max {
		return nil, refuse(refusedVersion, "node %s chose version %d of the peer protocol, this one speaks %d to %d", t.name(to), c.min, h.min, h.max)
	}
	if c.from != to {
		return nil, refuse(refusedNode, "node %s answered where node %s was expected: check the peers' addresses", t.name(c.from), t.name(to))
	}
	proof := prove(t.opt.Secret, labelDialer, h.raw, c.raw)
	if err := writeHandshake(conn, peerwire.KindProof, proof[:]); err != nil {
		return nil, err
	}
	answer, err := readHandshake(conn, peerwire.KindWelcome)
	if err != nil {
		return nil, err
	}
	if want := prove(t.opt.Secret, labelAcceptor, h.raw, c.raw); !hmac.Equal(answer, want[:]) {
		return nil, refuse(refusedSecret, "node %s does not know the secret: check peer_secret_file on both nodes", t.name(to))
	}
	if err := t.compatible(me, &c); err != nil {
		return nil, err
	}
	a := &accepted{conn: conn, from: to, lane: lane, peer: c.describe(conn, c.min)}
	a.keys.out = seed(t.opt.Secret, labelForth, h.raw, c.raw)
	a.keys.in = seed(t.opt.Secret, labelBack, h.raw, c.raw)
	return a, nil
}

func (h *hello) describe(conn net.Conn, version uint8) Peer {
	return Peer{Identity: Identity{Cluster: h.cluster, Logs: h.logs}, Version: version, Addr: conn.RemoteAddr().String()}
}

// compatible refuses a node that can't be of this cluster. Nodes that belong to none yet fit any.
func (t *Transport) compatible(me Identity, other *hello) error {
	var none replica.ClusterID
	switch {
	case me.Cluster == none || other.cluster == none:
		return nil
	case me.Cluster != other.cluster:
		return refuse(refusedCluster, "node %s belongs to cluster %x, node %s to %x: check the peers' addresses and data directories",
			t.name(other.from), other.cluster, t.name(t.opt.Self), me.Cluster)
	case me.Logs != other.logs:
		return refuse(refusedLogs, "node %s has %d logs, node %s has %d", t.name(other.from), other.logs, t.name(t.opt.Self), me.Logs)
	}
	return nil
}

// acceptHandshake is the other side of dialHandshake. A refusal has been told to the other node when it returns.
func (t *Transport) acceptHandshake(conn net.Conn) (*accepted, error) {
	a, err := t.answer(conn)
	var r *refusal
	if errors.As(err, &r) {
		if r.code == refusedSecret {
			t.pause(refusalDelay) // makes guessing slow
		}
		body := binary.BigEndian.AppendUint16(nil, r.code)
		text := r.text[:min(len(r.text), maxRefusalText)]
		body = binary.BigEndian.AppendUint16(body, uint16(len(text)))
		_ = writeHandshake(conn, peerwire.KindRefuse, append(body, text...)) // it is refused whether or not it hears of it
	}
	return a, err
}

func (t *Transport) answer(conn net.Conn) (*accepted, error) {
	raw, err := readHandshake(conn, peerwire.KindHello)
	if err != nil {
		return nil, err
	}
	var h hello
	if err := h.decode(peerwire.KindHello, raw); err != nil {
		return nil, err
	}
	version := min(h.max, t.opt.maxVersion)
	if version < h.min || version < t.opt.minVersion {
		return nil, refuse(refusedVersion, "node %s speaks versions %d to %d of the peer protocol, node %s speaks %d to %d",
			t.name(h.from), h.min, h.max, t.name(t.opt.Self), t.opt.minVersion, t.opt.maxVersion)
	}
	switch _, known := t.opt.Peers[h.from]; {
	case h.to != t.opt.Self:
		return nil, refuse(refusedNode, "node %s was called, but this is node %s: check the peers' addresses", t.name(h.to), t.name(t.opt.Self))
	case !known:
		return nil, refuse(refusedNode, "node %s is not among the peers of node %s", t.name(h.from), t.name(t.opt.Self))
	case h.from > t.opt.Self:
		return nil, refuse(refusedNode, "node %s calls node %s, but the lower number calls the higher", t.name(h.from), t.name(t.opt.Self))
	case h.lane >= peerwire.Lanes:
		return nil, fmt.Errorf("node %s calls for %v, which does not exist", t.name(h.from), h.lane)
	}
	me := t.opt.Identity()
	c := hello{min: version, max: version, lane: h.lane, from: t.opt.Self, to: h.from, logs: me.Logs, cluster: me.Cluster}
	c.encode()
	if err := writeHandshake(conn, peerwire.KindChallenge, c.raw); err != nil {
		return nil, err
	}
	proof, err := readHandshake(conn, peerwire.KindProof)
	if err != nil {
		return nil, err
	}
	if want := prove(t.opt.Secret, labelDialer, h.raw, c.raw); !hmac.Equal(proof, want[:]) {
		return nil, refuse(refusedSecret, "node %s does not know the secret: check peer_secret_file on both nodes", t.name(h.from))
	}
	if err := t.compatible(me, &h); err != nil {
		return nil, err
	}
	mine := prove(t.opt.Secret, labelAcceptor, h.raw, c.raw)
	if err := writeHandshake(conn, peerwire.KindWelcome, mine[:]); err != nil {
		return nil, err
	}
	a := &accepted{conn: conn, from: h.from, lane: h.lane, peer: h.describe(conn, version)}
	a.keys.out = seed(t.opt.Secret, labelBack, h.raw, c.raw)
	a.keys.in = seed(t.opt.Secret, labelForth, h.raw, c.raw)
	return a, nil
}

// writeHandshake writes a frame of the handshake, within the connection's deadline.
func writeHandshake(conn net.Conn, k peerwire.Kind, body []byte) error {
	b := make([]byte, peerwire.HeaderLen, peerwire.HeaderLen+len(body))
	peerwire.PutHeader(b, &peerwire.Header{Version: handshakeVersion, Kind: k, Len: len(body)})
	b = append(b, body...)
	var sum peerwire.Hasher
	peerwire.PutSum(b, sum.Sum(b, body, nil))
	_, err := conn.Write(b)
	return err
}

// readHandshake reads the frame of the handshake that comes next, which must be of kind want or a REFUSE. Not a byte
// behind it is read.
func readHandshake(conn net.Conn, want peerwire.Kind) ([]byte, error) {
	b := make([]byte, peerwire.HeaderLen)
	if _, err := io.ReadFull(conn, b); err != nil {
		return nil, err
	}
	h, err := peerwire.ParseHeader(b)
	switch {
	case err != nil:
		return nil, err
	case h.Version != handshakeVersion || h.Flags != 0 || (h.Kind != want && h.Kind != peerwire.KindRefuse):
		return nil, fmt.Errorf("%v of version %d came where %v was expected", h.Kind, h.Version, want)
	case h.Len > maxHandshakeBody:
		return nil, fmt.Errorf("%v: %w: %d bytes", h.Kind, peerwire.ErrLen, h.Len)
	}
	body := make([]byte, h.Len)
	if _, err := io.ReadFull(conn, body); err != nil {
		return nil, err
	}
	var sum peerwire.Hasher
	if sum.Sum(b, body, nil) != h.Sum {
		return nil, fmt.Errorf("%v: %w", h.Kind, peerwire.ErrChecksum)
	}
	if h.Kind == peerwire.KindRefuse {
		return nil, decodeRefuse(body)
	}
	return body, nil
}

// decodeRefuse turns a REFUSE into the error that it tells.
func decodeRefuse(b []byte) error {
	if len(b) < refuseLen || len(b) != refuseLen+int(binary.BigEndian.Uint16(b[2:])) || len(b) > refuseLen+maxRefusalText {
		return fmt.Errorf("%w: %v", peerwire.ErrBody, peerwire.KindRefuse)
	}
	return &refusal{binary.BigEndian.Uint16(b), fmt.Sprintf("the other node refuses: %q", b[refuseLen:])}
}
