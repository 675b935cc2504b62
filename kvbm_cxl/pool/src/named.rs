// SPDX-License-Identifier: Apache-2.0
//! Enumerations whose variants have names.

/// Declares an enumeration with `ALL` of its variants, in order, and the `name` of each.
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* $enum:ident { $($(#[$doc:meta])* $variant:ident $(($number:literal))? = $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $enum { $($(#[$doc])* $variant $(= $number)?,)* }

        impl $enum {
            /// All of them, in order.
            #[allow(dead_code, reason = "a private enumeration may need names only")]
            pub const ALL: [$enum; [$($name),*].len()] = [$($enum::$variant),*];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $($enum::$variant => $name,)* }
            }
        }
    };
}

pub(crate) use named_enum;
