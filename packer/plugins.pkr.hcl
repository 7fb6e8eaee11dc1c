# SPDX-License-Identifier: Apache-2.0
# Packer 1.7 and later fetches these plugins with `packer init`.  Packer 1.6 contains the builders and does not know
# this block: remove the file for it.

packer {
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = ">= 1.2.0"
    }
    googlecompute = {
      source  = "github.com/hashicorp/googlecompute"
      version = ">= 1.1.0"
    }
  }
}
