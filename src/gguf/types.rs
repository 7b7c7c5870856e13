//! Facts of ggml's tensor types, as a GGUF file numbers them. The launcher has no ggml that it could ask.

/// One tensor type.
#[derive(Debug, PartialEq, Eq)]
pub struct Type {
    /// Its number in a GGUF file.
    pub id: u32,
    /// ggml's name, for example `q4_K`.
    pub name: &'static str,
    /// Elements per block.
    pub block: u64,
    /// Bytes per block.
    pub bytes: u64,
}

impl Type {
    /// The type with this number, if there is one at the pinned revision.
    pub fn of(id: u32) -> Option<&'static Self> {
        TYPES.iter().find(|known| known.id == id)
    }
}

/// `type_traits` in ggml.c; a test of `cli` compares each with ggml's own answers.
#[rustfmt::skip]
const TYPES: [Type; 35] = [
    Type { id: 0, name: "f32", block: 1, bytes: 4 },
    Type { id: 1, name: "f16", block: 1, bytes: 2 },
    Type { id: 2, name: "q4_0", block: 32, bytes: 18 },
    Type { id: 3, name: "q4_1", block: 32, bytes: 20 },
    Type { id: 6, name: "q5_0", block: 32, bytes: 22 },
    Type { id: 7, name: "q5_1", block: 32, bytes: 24 },
    Type { id: 8, name: "q8_0", block: 32, bytes: 34 },
    Type { id: 9, name: "q8_1", block: 32, bytes: 36 },
    Type { id: 10, name: "q2_K", block: 256, bytes: 84 },
    Type { id: 11, name: "q3_K", block: 256, bytes: 110 },
    Type { id: 12, name: "q4_K", block: 256, bytes: 144 },
    Type { id: 13, name: "q5_K", block: 256, bytes: 176 },
    Type { id: 14, name: "q6_K", block: 256, bytes: 210 },
    Type { id: 15, name: "q8_K", block: 256, bytes: 292 },
    Type { id: 16, name: "iq2_xxs", block: 256, bytes: 66 },
    Type { id: 17, name: "iq2_xs", block: 256, bytes: 74 },
    Type { id: 18, name: "iq3_xxs", block: 256, bytes: 98 },
    Type { id: 19, name: "iq1_s", block: 256, bytes: 50 },
    Type { id: 20, name: "iq4_nl", block: 32, bytes: 18 },
    Type { id: 21, name: "iq3_s", block: 256, bytes: 110 },
    Type { id: 22, name: "iq2_s", block: 256, bytes: 82 },
    Type { id: 23, name: "iq4_xs", block: 256, bytes: 136 },
    Type { id: 24, name: "i8", block: 1, bytes: 1 },
    Type { id: 25, name: "i16", block: 1, bytes: 2 },
    Type { id: 26, name: "i32", block: 1, bytes: 4 },
    Type { id: 27, name: "i64", block: 1, bytes: 8 },
    Type { id: 28, name: "f64", block: 1, bytes: 8 },
    Type { id: 29, name: "iq1_m", block: 256, bytes: 56 },
    Type { id: 30, name: "bf16", block: 1, bytes: 2 },
    Type { id: 34, name: "tq1_0", block: 256, bytes: 54 },
    Type { id: 35, name: "tq2_0", block: 256, bytes: 66 },
    Type { id: 39, name: "mxfp4", block: 32, bytes: 17 },
    Type { id: 40, name: "nvfp4", block: 64, bytes: 36 },
    Type { id: 41, name: "q1_0", block: 128, bytes: 18 },
    Type { id: 42, name: "q2_0", block: 64, bytes: 18 },
];
