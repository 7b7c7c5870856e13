//! JSON as both readers of profiles take it.

use serde::de::value::MapAccessDeserializer;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::marker::PhantomData;

/// The most that is repeated of a value or a reason, in characters.
const MAX_SHOWN: usize = 200;

/// A JSON object. Serde alone would also take a list of the fields' values for it.
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Map<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(Map(PhantomData))
    }
}

/// Checks that `text` is one JSON value, nested no deeper than serde_json follows. Stores nothing.
///
/// Serde passes over fields that it does not know without counting levels, so this is a pass of its own.
pub fn check(text: &str) -> serde_json::Result<()> {
    serde_json::from_str(text).map(|Any| ())
}

/// Whether an error of [`check`] says that the text is nested too deeply. serde_json has no other sign of it.
pub fn is_too_deep(error: &serde_json::Error) -> bool {
    error.is_syntax() && error.to_string().starts_with("recursion limit exceeded")
}

/// Any JSON value.
struct Any;

impl<'de> Deserialize<'de> for Any {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Any {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        while list.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self, A::Error> {
        while object.next_entry::<IgnoredAny, Self>()?.is_some() {}
        Ok(self)
    }
}

/// The text's beginning, for a message of one line.
pub fn short(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_value_is_json_and_only_that() {
        for text in ["null", "true", "-1", "1", "1.5", "1e300", r#""a\n""#, "[]", r#"{"a":[1,{"b":null}]}"#] {
            check(text).unwrap();
        }
        for text in ["", "{", "[1,]", "nan", "1 2", r#"{"a"}"#, r#"{1:2}"#, "1e999"] {
            assert!(!is_too_deep(&check(text).unwrap_err()), "{text}");
        }
    }

    #[test]
    fn as_many_levels_as_are_promised_are_followed_and_endless_ones_are_not() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        let most = crate::profile::format::MAX_DEPTH as usize;
        check(&nested(most)).unwrap();
        for text in [nested(most + 1), "[".repeat(1 << 20), r#"{"a":"#.repeat(1 << 20)] {
            assert!(is_too_deep(&check(&text).unwrap_err()));
        }
    }
}
