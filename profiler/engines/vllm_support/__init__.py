"""Parts of the vLLM engine: start-up, batches, realistic state, expert slices, tracing, parallel compilation."""
