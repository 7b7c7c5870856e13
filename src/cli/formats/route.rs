//! Writing a trace as route CSV. `crate::trace` reads it.

use crate::trace::{Calls, LayerTrace, Trace};
use crate::units::Expert;
use anyhow::Result;
use csv::Writer;
use std::io::Write;

/// Writes every token's experts, token by token, layer by layer. What the router weighed them with is not known.
pub fn write(trace: &Trace) -> Result<Vec<u8>> {
    let mut file = Vec::new();
    let most = |number: fn(&LayerTrace) -> u16| trace.layers.iter().map(number).max().unwrap_or(0);
    let n_layer = most(|layer| layer.info.layer) + 1;
    let (n_expert, n_used) = (most(|layer| layer.info.n_expert), most(|layer| layer.info.n_used));
    writeln!(file, "# route_trace v1\n# n_layer={n_layer} n_expert={n_expert} n_expert_used={n_used}")?;
    for layer in &trace.layers {
        if let Some(bytes) = layer.info.expert_bytes {
            writeln!(file, "# layer={} expert_bytes={bytes}", layer.info.layer)?;
        }
    }
    let mut rows = Writer::from_writer(file);
    rows.write_record(["turn", "phase", "step", "layer", "slot", "expert"])?;
    let parts: [fn(&LayerTrace) -> &Calls; 2] = [|layer| &layer.prompt, |layer| &layer.decode];
    for (phase, part) in parts.into_iter().enumerate() {
        let tokens: Vec<Vec<&[Expert]>> = trace.layers.iter().map(|layer| tokens(layer, part(layer))).collect();
        let n_tokens = tokens.iter().map(Vec::len).max().unwrap_or(0);
        for step in 0..n_tokens {
            for (layer, tokens) in trace.layers.iter().zip(&tokens) {
                // A layer that computes fewer tokens computes the last ones.
                let Some(&ids) = (step + tokens.len()).checked_sub(n_tokens).and_then(|at| tokens.get(at)) else {
                    continue;
                };
                for (slot, id) in ids.iter().enumerate() {
                    if ids[..slot].contains(id) {
                        continue; // the format has each expert once per token
                    }
                    let row = [0, phase, step, layer.info.layer.into(), slot, id.0.into()];
                    rows.write_record(row.map(|number| number.to_string()))?;
                }
            }
        }
    }
    Ok(rows.into_inner().map_err(|error| error.into_error())?)
}

/// The experts of each token of a layer.
fn tokens<'a>(layer: &LayerTrace, calls: &'a Calls) -> Vec<&'a [Expert]> {
    calls.iter().flat_map(|ids| ids.chunks(usize::from(layer.info.n_used).max(1))).collect()
}
