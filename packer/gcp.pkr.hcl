# SPDX-License-Identifier: Apache-2.0
# A Compute Engine image with the daemon enabled.

source "googlecompute" "swansong" {
  project_id   = var.gcp_project
  zone         = var.gcp_zone
  subnetwork   = var.gcp_subnetwork
  machine_type = var.gcp_machine_type
  disk_size    = var.gcp_disk_gb
  disk_type    = var.gcp_disk_type
  image_name   = "${var.image_name}-${local.stamp}"
  image_family = var.image_name

  source_image_family     = var.gcp_source_family
  source_image_project_id = [var.gcp_source_project]

  # Compute Engine encrypts every disk and image by itself.
  use_iap          = var.gcp_iap
  omit_external_ip = var.gcp_iap
  use_internal_ip  = var.gcp_iap

  ssh_username              = "packer"
  ssh_clear_authorized_keys = true
}
