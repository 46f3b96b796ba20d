package protocol

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// declaredCodes reads the constants of type ErrorCode from the source, so that the table cannot fall behind.
func declaredCodes(t *testing.T) map[ErrorCode]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "code.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	codes := map[ErrorCode]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		value, err := strconv.ParseUint(spec.Values[0].(*ast.BasicLit).Value, 0, 16)
		if err != nil {
			t.Fatal(err)
		}
		codes[ErrorCode(value)] = spec.Names[0].Name
		return true
	})
	return codes
}

func TestErrorCode_TheTableIsExhaustive(t *testing.T) {
	codes := declaredCodes(t)
	if len(codes) != 49 {
		t.Errorf("%d codes are declared, 49 are published", len(codes))
	}
	names := map[string]ErrorCode{}
	for code, constant := range codes {
		if !code.Known() {
			t.Errorf("%s is not in the table", constant)
			continue
		}
		want := "Code" + strings.ReplaceAll(code.Name(), "_", "")
		if !strings.EqualFold(want, constant) {
			t.Errorf("%s has the name %s", constant, code.Name())
		}
		if !regexp.MustCompile(`^[A-Z_]+$`).MatchString(code.Name()) || len(code.Text()) < 15 || len(code.Text()) > MaxErrMessage {
			t.Errorf("%s: name %q, text %q", constant, code.Name(), code.Text())
		}
		if code.Closes() && code.Retriable() {
			t.Errorf("%s closes and is retriable", constant)
		}
		if other, taken := names[code.Name()]; taken {
			t.Errorf("0x%04X and 0x%04X share the name %s", code, other, code.Name())
		}
		names[code.Name()] = code
	}
	for code := range codeTable {
		if _, ok := codes[code]; !ok {
			t.Errorf("0x%04X is in the table but not declared", uint16(code))
		}
	}
}

func TestErrorCode_ClosesAsPublished(t *testing.T) {
	for code := range codeTable {
		want := code <= CodeAuthTimeout || code == CodeSlowConsumer
		if code.Closes() != want {
			t.Errorf("%s: Closes() = %v", code.Name(), code.Closes())
		}
	}
}

func TestErrorCode_RetriableAnswersToAPublish(t *testing.T) {
	for code, want := range map[ErrorCode]bool{
		CodeBackpressure: true, CodeStorageHighWatermark: true, CodeReadOnlyDegraded: true,
		CodeInSyncReplicasNotEnough: true, CodeMetadataReadOnly: true,
		CodeSeqGap: false, CodeSeqExpired: false, CodeStaleLeaderEpoch: false, CodeUnknownTopic: false,
		CodeInternal: false, ErrorCode(0x7777): false,
	} {
		if code.Retriable() != want {
			t.Errorf("%s: Retriable() = %v", code.Name(), code.Retriable())
		}
	}
}

func TestErrorCode_UnknownOnesStillPrint(t *testing.T) {
	code := ErrorCode(0x7777)
	if code.Known() || code.Closes() || code.Name() != "0x7777" || !strings.Contains(code.Error(), "upgrade") {
		t.Errorf("%q, %v, %v", code.Error(), code.Known(), code.Closes())
	}
}

func TestError_MatchesItsCode(t *testing.T) {
	frame := ErrFrame{Code: CodeUnknownTopic, RequestOp: OpPub, Message: []byte("topic 9 does not exist")}
	err := fmt.Errorf("publish: %w", frame.Err())
	if !errors.Is(err, CodeUnknownTopic) || errors.Is(err, CodeInternal) {
		t.Error("errors.Is does not match by code")
	}
	var full *Error
	if !errors.As(err, &full) || full.RequestOp != OpPub {
		t.Error("errors.As does not find the *Error")
	}
	if code, ok := CodeOf(err); !ok || code != CodeUnknownTopic {
		t.Errorf("CodeOf = %v, %v", code, ok)
	}
	if _, ok := CodeOf(errors.New("other")); ok {
		t.Error("CodeOf finds a code in a foreign error")
	}
	if want := "publish: PUB: UNKNOWN_TOPIC (0x0008): topic 9 does not exist"; err.Error() != want {
		t.Errorf("text %q, want %q", err.Error(), want)
	}
	if got := (&Error{Code: CodeAuthFailed}).Error(); got != "AUTH_FAILED (0x0006): authentication failed: check the token" {
		t.Errorf("text without op and message: %q", got)
	}
}
