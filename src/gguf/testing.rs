//! Small GGUF files for unit tests.

/// A file under construction: metadata entries, then tensors.
#[derive(Default)]
pub(crate) struct Writer {
    entries: Vec<u8>,
    n_entries: u64,
    tensors: Vec<u8>,
    n_tensors: u64,
    n_bytes: u64,
}

impl Writer {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// A metadata entry whose value's bytes are given as they stand in the file.
    pub(crate) fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        push_text(&mut self.entries, key);
        self.entries.extend(kind.to_le_bytes());
        self.entries.extend(value);
        self.n_entries += 1;
        self
    }

    /// A tensor; its bytes follow those of the last one.
    pub(crate) fn tensor(self, name: &str, kind: u32, shape: &[u64], n_bytes: u64) -> Self {
        let offset = self.n_bytes;
        let mut with = self.tensor_at(name, kind, shape, offset);
        with.n_bytes += n_bytes;
        with
    }

    /// A tensor at this offset.
    pub(crate) fn tensor_at(mut self, name: &str, kind: u32, shape: &[u64], offset: u64) -> Self {
        push_text(&mut self.tensors, name);
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|n| self.tensors.extend(n.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.n_tensors += 1;
        self
    }

    /// The file; every tensor's bytes are `fill`.
    pub(crate) fn finish(&self, fill: u8) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend(self.n_tensors.to_le_bytes());
        file.extend(self.n_entries.to_le_bytes());
        file.extend(&self.entries);
        file.extend(&self.tensors);
        file.resize(file.len().next_multiple_of(32), 0);
        file.resize(file.len() + self.n_bytes as usize, fill);
        file
    }
}

/// A model with `n_layers` layers of one f32 expert tensor `[4, 2, n_expert]` each.
pub(crate) fn moe(n_layers: u32, n_expert: u64) -> Writer {
    let add = |writer: Writer, layer| {
        writer.tensor(&format!("blk.{layer}.ffn_up_exps.weight"), 0, &[4, 2, n_expert], 32 * n_expert)
    };
    let biases = Writer::new().tensor("blk.9.ffn_up_exps.bias", 0, &[2, n_expert], 8 * n_expert);
    (0..n_layers).fold(biases, add)
}

pub(crate) fn text(value: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_text(&mut bytes, value);
    bytes
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
