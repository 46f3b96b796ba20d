package client

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

const (
	// maxHints is how many times a search follows what nodes say of the leader before it pauses.
	maxHints = 4
	// electionPause and maxElectionPause are the first and the longest pause while nodes answer but none leads: a cluster
	// elects within a second or two, so that quickElections pauses are of twice the first at most; from then on they double.
	// WithBackoff's times apply where they are shorter.
	electionPause    = 100 * time.Millisecond
	maxElectionPause = time.Second
	quickElections   = 12
	// minAttempt is the least time that an attempt gets when there are other nodes to try.
	minAttempt = time.Second
)

// nodes is what a Client knows of the brokers: a single one, or the nodes of a cluster.
type nodes struct {
	mu     sync.Mutex
	addrs  []string // as given to Dial
	at     int      // the one in addrs to try first
	leader string   // named by a node that does not lead; tried before all others
	former string   // a leader that could not be used and is not in addrs; tried after all others
}

// parseAddrs reads Dial's address.
func parseAddrs(list string) ([]string, error) {
	var addrs []string
	var problems []error
	for addr := range strings.SplitSeq(list, ",") {
		if addr = strings.TrimSpace(addr); addr == "" {
			continue
		}
		full, err := CompleteAddr(addr, DefaultPort)
		if err != nil {
			problems = append(problems, err)
		}
		if !slices.Contains(addrs, full) {
			addrs = append(addrs, full)
		}
	}
	if len(addrs) == 0 {
		return nil, errors.New("no address to connect to: name a broker as host:port")
	}
	return addrs, errors.Join(problems...)
}

// CompleteAddr returns an address, host or host:port, with port if it has none, as Dial does with DefaultPort. An error says
// what is wrong with the address.
func CompleteAddr(addr, port string) (string, error) {
	host, given, err := net.SplitHostPort(addr)
	switch {
	case strings.Contains(addr, "://"):
		return "", fmt.Errorf("address %q: use host:port, without a scheme", addr)
	case err == nil && validPort(given):
		return addr, nil
	case err == nil && given != "":
		return "", fmt.Errorf("address %q: the port must be a number from 1 to 65535", addr)
	case err == nil: // "host:"
	default:
		host = strings.TrimSuffix(strings.TrimPrefix(addr, "["), "]")
		if strings.Contains(host, ":") && net.ParseIP(host) == nil {
			return "", fmt.Errorf("address %q: use host:port", addr)
		}
	}
	return net.JoinHostPort(host, port), nil
}

func validPort(port string) bool {
	n, err := strconv.Atoi(port)
	return err == nil && n >= 1 && n <= 65535
}

// count returns how many nodes are known.
func (n *nodes) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.all())
}

// all returns the known nodes in the order of trying them, possibly with one twice.
func (n *nodes) all() []string {
	var list []string
	if n.leader != "" {
		list = append(list, n.leader)
	}
	list = append(append(list, n.addrs[n.at:]...), n.addrs[:n.at]...)
	if n.former != "" {
		list = append(list, n.former)
	}
	return list
}

// demote makes the next attempt go elsewhere.
func (n *nodes) demote(addr string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.leader == addr {
		n.leader = ""
		if !slices.Contains(n.addrs, addr) {
			n.former = addr
		}
	}
	if n.addrs[n.at] == addr {
		n.at = (n.at + 1) % len(n.addrs)
	}
}

// promote makes the next attempt go to addr, which is said to lead.
func (n *nodes) promote(addr string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.leader = addr
	if n.former == addr {
		n.former = ""
	}
}

// search is the way of one Producer, Consumer or call to a node that serves it. It goes round the nodes, the one that is
// said to lead first, and tries each at most once before it pauses. It belongs to one goroutine.
type search struct {
	nodes *nodes
	cfg   *config

	// This round.
	tried    []string
	hints    int
	accepted bool  // a node took the client
	electing bool  // a node said that it does not lead, or not yet
	refused  error // a node does not take the client, and waiting won't help

	pauses    int // since the last success
	elections int
}

func (c *Client) newSearch() *search { return &search{nodes: &c.nodes, cfg: &c.cfg} }

// next returns the node to try, "" when it is time for a pause.
func (s *search) next() string {
	s.nodes.mu.Lock()
	defer s.nodes.mu.Unlock()
	for _, addr := range s.nodes.all() {
		if !slices.Contains(s.tried, addr) {
			return addr
		}
	}
	return ""
}

// timeout is how long the attempt at a node may take: at first the nodes share the dial timeout, so that one that does not
// answer holds nobody up for long.
func (s *search) timeout() time.Duration {
	n := s.nodes.count()
	if n == 1 || s.pauses+s.elections > 0 {
		return s.cfg.dialTimeout
	}
	return min(max(s.cfg.dialTimeout/time.Duration(n), minAttempt), s.cfg.dialTimeout)
}

// failed notes why addr serves no more, or not at all; opened says that it took the client.
func (s *search) failed(addr string, opened bool, err error) {
	s.tried = append(s.tried, addr)
	s.nodes.demote(addr)
	if fatal(err) {
		s.refused = err
		return
	}
	s.accepted = s.accepted || opened
	s.waitFor(err)
	if leader := leaderOf(err); leader != "" && s.hints < maxHints && !slices.Contains(s.tried, leader) {
		s.hints++
		s.nodes.promote(leader)
	}
}

// waitFor has the next pause be a short one if err is what a cluster says while it has no leader, or a very new one.
func (s *search) waitFor(err error) {
	code, refused := protocol.CodeOf(err)
	s.electing = s.electing || elsewhere(err) || (refused && withoutQuorum(code))
}

// hopeless is why another round is of no use: all nodes that could be asked do not take this client.
func (s *search) hopeless() error {
	if s.accepted {
		return nil
	}
	return s.refused
}

// pause ends a round and returns how long to wait before the next one.
func (s *search) pause() time.Duration {
	var d time.Duration
	if s.electing {
		d = s.cfg.electionBackoff(s.elections)
		s.elections++
	} else {
		d = s.cfg.backoff(s.pauses)
		s.pauses++
	}
	s.round()
	return d
}

func (s *search) round() {
	s.tried, s.hints, s.accepted, s.electing, s.refused = s.tried[:0], 0, false, false, nil
}

// succeeded makes the next round a first one.
func (s *search) succeeded() {
	s.round()
	s.pauses, s.elections = 0, 0
}

// leaderOf takes the leader's address out of the text of a follower's refusal, "leader=<node_id> <host:port>"; "" if it
// names none.
func leaderOf(err error) string {
	var refusal *Error
	if !errors.As(err, &refusal) || refusal.Code != protocol.CodeStaleLeaderEpoch {
		return ""
	}
	_, rest, _ := strings.Cut(refusal.Message, "leader=")
	words := strings.Fields(rest)
	if len(words) < 2 {
		return ""
	}
	host, port, err := net.SplitHostPort(words[1])
	if err != nil || host == "" || !validPort(port) {
		return ""
	}
	return words[1]
}

// elsewhere reports whether err is the answer of a node that can't serve now because another one does or will.
func elsewhere(err error) bool {
	code, ok := protocol.CodeOf(err)
	return ok && (code == protocol.CodeStaleLeaderEpoch || code == protocol.CodeCatchupRequired)
}

// withoutQuorum reports whether code is the answer of a leader that has lost its followers: either they are gone, or it is
// cut off and another one leads.
func withoutQuorum(code protocol.ErrorCode) bool {
	switch code {
	case protocol.CodeQuorumLost, protocol.CodeReadOnlyDegraded, protocol.CodeInSyncReplicasNotEnough, protocol.CodeLeaseExpired,
		protocol.CodeMetadataReadOnly:
		return true
	default:
		return false
	}
}
