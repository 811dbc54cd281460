// A client of Baton in Go, by stubs that buf has made.
//
//	buf generate PROTOS --path PROTOS/baton/v1 --template buf.gen.yaml
//	go mod tidy
//	go run . HOST:PORT[,HOST:PORT...] PROMPT
//
// PROTOS is the folder protos of Baton's sources.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	baton "example.com/baton-client/gen/baton/v1"
)

const largestPause = 5 * time.Second // between two tries

// Sequence is what has come of one sequence.
type Sequence struct {
	TokenIDs []uint32
	Text     string
	Reason   baton.FinishReason
	hasRest  bool
}

// Add takes some tokens and returns their text, which is empty if it has come before.
//
// (sequence, position) names a token: another router, or the same once more, says none twice. Text
// that was held back may come behind the last token, with no token of its own.
func (s *Sequence) Add(chunk *baton.TokenChunk) (string, error) {
	switch {
	case len(chunk.TokenIds) > 0:
		if int(chunk.Position) != len(s.TokenIDs) {
			return "", errors.New("tokens are left out, or come twice")
		}
		s.TokenIDs = append(s.TokenIDs, chunk.TokenIds...)
		s.Reason = chunk.FinishReason
	case s.hasRest:
		return "", nil
	default:
		s.hasRest = true
	}
	s.Text += chunk.Text
	return chunk.Text, nil
}

// Client has routers, of which the first that answers is asked. Of one goroutine at a time.
type Client struct {
	conns []*grpc.ClientConn
	stubs []baton.InferenceClient
	token string
	asked int
}

// NewClient opens its connections when they are needed. A token may be empty.
func NewClient(addresses []string, token string) (*Client, error) {
	client := &Client{token: token}
	for _, address := range addresses {
		// Dial resolves a name for every connection. With grpc.NewClient, which resolves it every
		// 30 s at most, call dns.SetMinResolutionInterval(time.Second) first (resolver/dns).
		conn, err := grpc.Dial(
			address,
			grpc.WithInsecure(), // or grpc.WithTransportCredentials
			// A router that falls silent is noticed within some seconds.
			grpc.WithKeepaliveParams(
				keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second},
			),
		)
		if err != nil {
			return nil, err
		}
		client.conns = append(client.conns, conn)
		client.stubs = append(client.stubs, baton.NewInferenceClient(conn))
	}
	return client, nil
}

// Close ends the connections and every generation on them.
func (c *Client) Close() {
	for _, conn := range c.conns {
		conn.Close()
	}
}

// Generate hands text to onText as it comes; sequences, one for each that is asked for, have it all
// in the end. The deadline of ctx is for all of it, tries among them, and ending ctx cancels the
// call. It goes on behind what has come where a router is lost.
func (c *Client) Generate(
	ctx context.Context,
	request *baton.GenerateRequest,
	sequences []*Sequence,
	onText func(index uint32, text string) error,
) error {
	request = proto.Clone(request).(*baton.GenerateRequest)
	ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", traceparent())
	if c.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.token)
	}
	pause := 100 * time.Millisecond
	for {
		err := c.call(ctx, request, sequences, onText)
		switch status.Code(err) {
		case codes.ResourceExhausted:
			delay, ok := retryDelay(err)
			if !ok { // a message that is too large, which none would take
				return err
			}
			pause = delay
		case codes.Unavailable:
			if pause *= 2; pause > largestPause {
				pause = largestPause
			}
			c.asked = (c.asked + 1) % len(c.stubs)
		default:
			return err
		}
		if deadline, ok := ctx.Deadline(); ok && time.Now().Add(pause).After(deadline) {
			return err
		}
		request.ContinueFrom = received(sequences)
		select {
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-time.After(pause):
		}
	}
}

// call is one try.
func (c *Client) call(
	ctx context.Context,
	request *baton.GenerateRequest,
	sequences []*Sequence,
	onText func(index uint32, text string) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.stubs[c.asked].Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if accepted := event.GetAccepted(); accepted != nil {
			// Of a router that goes on, the same seed has to be asked for.
			request.Sampling.Seed = proto.Uint64(accepted.Seed)
		}
		if chunk := event.GetTokens(); chunk != nil {
			text, err := sequences[chunk.SequenceIndex].Add(chunk)
			if err != nil {
				return err
			}
			if err := onText(chunk.SequenceIndex, text); err != nil {
				return err
			}
		}
	}
}

// received is what a router is told that goes on: nothing, if nothing has come.
func received(sequences []*Sequence) []*baton.ReceivedTokens {
	var all []*baton.ReceivedTokens
	numTokens := 0
	for _, one := range sequences {
		all = append(all, &baton.ReceivedTokens{Ids: one.TokenIDs, FinishReason: one.Reason})
		numTokens += len(one.TokenIDs)
	}
	if numTokens == 0 {
		return nil
	}
	return all
}

// retryDelay is for how long a router that has too much to do would not be asked.
func retryDelay(err error) (time.Duration, bool) {
	for _, detail := range status.Convert(err).Details() {
		if retry, ok := detail.(*errdetails.RetryInfo); ok {
			delay := retry.GetRetryDelay()
			return time.Duration(delay.GetSeconds())*time.Second +
				time.Duration(delay.GetNanos()), true
		}
	}
	return 0, false
}

// traceparent begins a trace of its own; in a program that is traced, its own context goes here.
func traceparent() string {
	ids := make([]byte, 24)
	if _, err := rand.Read(ids); err != nil {
		log.Fatal(err)
	}
	return fmt.Sprintf("00-%x-%x-01", ids[:16], ids[16:])
}

func tell(what map[string]any) {
	if err := json.NewEncoder(os.Stdout).Encode(what); err != nil {
		log.Fatal(err)
	}
}

func show(client *Client, prompt string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	request := &baton.GenerateRequest{
		Input: &baton.GenerateRequest_Text{Text: prompt},
		Sampling: &baton.SamplingParams{
			MaxTokens:   proto.Uint32(24),
			N:           proto.Uint32(2),
			Temperature: proto.Float64(0.8),
			Seed:        proto.Uint64(7),
			IgnoreEos:   true,
		},
	}
	sequences := []*Sequence{{}, {}}
	err := client.Generate(ctx, request, sequences, func(index uint32, text string) error {
		_, err := fmt.Fprintf(os.Stderr, "%d %q\n", index, text)
		return err
	})
	for index, one := range sequences {
		tell(map[string]any{"sequence": index, "text": one.Text, "token_ids": one.TokenIDs})
	}
	return err
}

// stop shows how a generation is ended: workers give back what it held.
func stop(client *Client, prompt string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	sequence := &Sequence{}
	err := client.Generate(ctx, long(prompt, 300), []*Sequence{sequence}, func(uint32, string) error {
		if len(sequence.TokenIDs) >= 5 {
			cancel()
		}
		return nil
	})
	if status.Code(err) != codes.Canceled {
		return err
	}
	tell(map[string]any{"cancelled_after": len(sequence.TokenIDs)})
	return nil
}

// missDeadline shows one: every process knows it, and none computes anything for what is too late.
func missDeadline(client *Client, prompt string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	nothing := func(uint32, string) error { return nil }
	err := client.Generate(ctx, long(prompt, 1500), []*Sequence{{}}, nothing)
	if status.Code(err) != codes.DeadlineExceeded {
		return err
	}
	tell(map[string]any{"deadline": "exceeded"})
	return nil
}

func long(prompt string, maxTokens uint32) *baton.GenerateRequest {
	return &baton.GenerateRequest{
		Input: &baton.GenerateRequest_Text{Text: prompt},
		Sampling: &baton.SamplingParams{
			MaxTokens: proto.Uint32(maxTokens),
			IgnoreEos: true,
		},
	}
}

func main() {
	client, err := NewClient(strings.Split(os.Args[1], ","), os.Getenv("BATON_TOKEN"))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	for _, step := range []func(*Client, string) error{show, stop, missDeadline} {
		if err := step(client, os.Args[2]); err != nil {
			log.Fatal(err)
		}
	}
}
